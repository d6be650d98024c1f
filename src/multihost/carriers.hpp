// SPDX-License-Identifier: Apache-2.0
#pragma once
// Carriers: in a gather from many ranks of other hosts, one rank of each host sends the small parts of all of them. So
// the connections and the messages in flight of the root depend on the hosts, not on the ranks.
//
//  1. The carrier of a host is the first member of the list on that host.
//  2. The other members of the list on that host pass their header messages, with all bytes of their parts, to the
//     carrier through shared memory. A member whose part is large, or that has no value, passes a message without a
//     part.
//  3. The carrier sends these messages to the root before its own. Each contains the rank of its origin.
// So all members on other hosts must call Transfer::move(). The carrier holds at most eight parts of other ranks at a
// time.
//
// A large part goes directly from its rank to the root: the copy into the carrier's memory would cost more than a
// connection (docs/explanation/cost-model.md). If only few ranks are on other hosts, every part goes directly to the
// root.

#include <cstdint>
#include <map>
#include <vector>

#include "src/gather/route.hpp"
#include "src/multihost/group.hpp"

namespace muster::multihost {

/// The maximum size of a part that a carrier sends, with its descriptor.
inline constexpr std::uint64_t most_carried = 1 << 20;
/// If a list has at most this many members on other hosts than the root, each of them sends directly.
inline constexpr std::size_t most_direct_senders = 32;

/// Returns whether the part that `record` announces is small enough for a carrier.
inline bool fits_carrier(const gather::ExchangeRecord& record) noexcept {
  return record.has_value && record.descriptor_bytes <= most_carried &&
         record.moving_bytes <= most_carried - record.descriptor_bytes;
}

/// The carriers of one gather. All members of the list compute the same.
class Carriers {
 public:
  Carriers(const gather::GatherCall& call, const HostsGroup& group);

  /// Returns whether small parts are sent by carriers.
  [[nodiscard]] bool are_used() const noexcept { return are_used_; }
  /// Returns the rank whose connection brings the small parts of `sender` to the root: `sender` itself if it sends
  /// directly. A sender may ask only about ranks of its own host.
  [[nodiscard]] int carrier_of(int sender) const;
  /// Returns the ranks whose parts this rank may carry, in the order of the list.
  [[nodiscard]] std::vector<int> riders() const;

 private:
  const gather::GatherCall& call_;
  const HostsGroup& group_;
  bool are_used_ = false;
  std::map<int, int> of_hosts_;  // the carrier of each host but the root's; on a sender, only that of its own host
};

}  // namespace muster::multihost

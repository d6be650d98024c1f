// SPDX-License-Identifier: Apache-2.0
#pragma once
// HostFold: the contents of a round over a tree of hosts (BaseGroup::fold). Unlike an all-gather, the messages of such
// a round need not contain the records of all ranks.

#include <cstddef>
#include <span>
#include <vector>

namespace muster::group {

/// Only the first rank of each host calls these functions, once per round and in this order. They may throw Error,
/// which fails the group. Messages of other hosts must be checked before they are used.
class HostFold {
 public:
  using Bytes = std::vector<std::byte>;
  virtual ~HostFold() = default;

  /// Appends the message to the host above. `here` has one record for each rank of this host, in the order of `ranks`.
  /// `below` has one message for each host directly below, in ascending order. No host receives the message of the top
  /// host.
  virtual void up(std::span<const int> ranks, std::span<const std::byte> here,
                  std::span<const std::span<const std::byte>> below, Bytes& out) = 0;
  /// Takes the message that down() has made on the host above. It is not called on the top host.
  virtual void take(std::span<const std::byte> above) = 0;
  /// Appends the message to the host with that index in `below`, or to the ranks of this host (own_host).
  virtual void down(std::size_t child, Bytes& out) const = 0;
  static constexpr std::size_t own_host = SIZE_MAX;
  /// Returns whether the messages of down() are all equal.
  [[nodiscard]] virtual bool tells_all_the_same() const noexcept { return false; }
};

}  // namespace muster::group

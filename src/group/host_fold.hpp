// SPDX-License-Identifier: Apache-2.0
#pragma once
// HostFold: the contents of a round over a tree of hosts (BaseGroup::fold). Unlike an all-gather, the messages of such
// a round need not contain the records of all ranks.

#include <cstddef>
#include <span>
#include <vector>

namespace muster::group {

/// Only the first rank of each host calls these functions, in this order. They may throw Error, which fails the group.
/// Messages of other hosts must be checked before they are used. An error of take_below() or take_above() names the
/// rank that sent the message. All spans stay valid until the round ends.
class HostFold {
 public:
  using Bytes = std::vector<std::byte>;
  virtual ~HostFold() = default;

  /// Takes the records of this host: one for each of `ranks`, in their order.
  virtual void begin(std::span<const int> ranks, std::span<const std::byte> here) = 0;
  /// Takes the message that up() has made on a host directly below. Called once for each of them, in ascending order.
  virtual void take_below(std::span<const std::byte> message) = 0;
  /// Appends the message to the host above. No host receives the message of the top host.
  virtual void up(Bytes& out) = 0;
  /// Takes the message that down() has made on the host above. It is not called on the top host.
  virtual void take_above(std::span<const std::byte> message) = 0;
  /// Appends the message to the directly lower host with that index, or to the ranks of this host (own_host).
  virtual void down(std::size_t child, Bytes& out) const = 0;
  static constexpr std::size_t own_host = SIZE_MAX;
  /// Returns whether the messages of down() are all equal.
  [[nodiscard]] virtual bool tells_all_the_same() const noexcept { return false; }
};

}  // namespace muster::group

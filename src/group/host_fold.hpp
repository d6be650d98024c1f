// SPDX-License-Identifier: Apache-2.0
#pragma once
// HostFold: the contents of a round over a tree of hosts (BaseGroup::fold). Unlike an all-gather, the messages of such
// a round need not contain the records of all ranks.

#include <fmt/core.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "src/group/error_propagation.hpp"

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

/// A fold of one value, which each message contains. All ranks get the sum of the values of all ranks; add() defines
/// what a sum is.
template <class Value>
class ValueFold : public HostFold {
 public:
  static_assert(std::is_trivially_copyable_v<Value>);

  /// The records are values.
  void begin(std::span<const int>, std::span<const std::byte> here) override {
    sum_ = read(here.first(sizeof(Value)));
    for (std::size_t at = sizeof(Value); at < here.size(); at += sizeof(Value))
      add(sum_, read(here.subspan(at, sizeof(Value))));
  }
  void take_below(std::span<const std::byte> message) final { add(sum_, read(message)); }
  void up(Bytes& out) final { down(own_host, out); }
  void take_above(std::span<const std::byte> message) final { sum_ = read(message); }
  void down(std::size_t, Bytes& out) const final {
    const auto bytes = std::as_bytes(std::span(&sum_, 1));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  [[nodiscard]] bool tells_all_the_same() const noexcept final { return true; }
  /// Returns the value in a message. Throws Error(corrupt).
  static Value read(std::span<const std::byte> message) {
    if (message.size() != sizeof(Value))
      throw malformed_round(fmt::format("{} bytes instead of {}", message.size(), sizeof(Value)));
    Value value;
    std::memcpy(&value, message.data(), sizeof value);
    return value;
  }

 protected:
  /// Adds the value of ranks that follow those of `sum`.
  virtual void add(Value& sum, const Value& value) = 0;
  Value sum_{};
};

}  // namespace muster::group

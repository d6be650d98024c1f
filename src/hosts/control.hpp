// SPDX-License-Identifier: Apache-2.0
#pragma once
// Control: the small messages that ranks of several hosts send each other between rounds (context.hpp).

#include <array>
#include <cstdint>
#include <type_traits>

#include "src/base/written.hpp"

namespace muster::hosts {

enum class ControlKind : std::uint32_t {
  notice = 1,      ///< the sender knows of a failure of the group; its host asks the receiver's for the decision
  left = 2,        ///< the sender has left the group
  ask = 3,         ///< a rank that waits asks whether the receiver moves, or whether another rank of that host lives
  answer = 4,      ///< to that
  disconnect = 5,  ///< the sender has no group of this context any more
  died = 6,        ///< the rank that was asked about is dead
  confirm = 7,     ///< to a notice or a decision, so that two ranks send to each other if one sends to the other
  decision = 8,    ///< the cause that all ranks of the group throw
};

/// Instead of a group's number: all groups of the context.
inline constexpr std::int32_t every_group = -1;

struct Control {
  ControlKind kind = ControlKind::notice;
  std::int32_t from = 0;
  std::int32_t group = every_group;
  std::int32_t about = -1;   ///< the rank that is asked about, or has died
  std::uint32_t round = 0;   ///< the last round that has ended for the sender of a notice or a decision
  std::uint32_t serial = 0;  ///< the number of a notice or a decision, which its confirmation repeats
  // Of an answer.
  std::uint64_t progress = 0;
  std::int32_t waits_for = -1;  ///< the rank that it waits for itself
  std::int32_t has_left = 0;    ///< the group that the message was about; of a confirmation, too
  std::int32_t is_decided = 0;  ///< `error` of a confirmation is the decision
  std::array<char, 48> phase{};
  WrittenError<1600> error = {};  ///< the cause that a notice, a decision or a confirmation is about
};
static_assert(std::is_trivially_copyable_v<Control> && sizeof(Control) <= 2048);

}  // namespace muster::hosts

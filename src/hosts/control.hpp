// SPDX-License-Identifier: Apache-2.0
#pragma once
// Control messages: the small messages between ranks of different hosts that are not part of a round (context.hpp).

#include <array>
#include <cstdint>
#include <type_traits>

#include "src/base/written.hpp"

namespace muster::hosts {

enum class ControlKind : std::uint32_t {
  notice = 1,      ///< the sender knows of a failure of the group; its host asks the receiver's host for the decision
  left = 2,        ///< the sender has left the group
  ask = 3,         ///< a waiting rank asks if the receiver makes progress, or if another rank of its host is alive
  answer = 4,      ///< the reply to `ask`
  disconnect = 5,  ///< the last group of this context has ended on the sender
  died = 6,        ///< the rank `about` is dead; also the reply to `ask`
  confirm = 7,     ///< the reply to a notice or a decision; so two ranks send in both directions or not at all
  decision = 8,    ///< the cause that all ranks of the group throw
};

/// The value of Control::group for all groups of the context.
inline constexpr std::int32_t every_group = -1;

struct Control {
  ControlKind kind = ControlKind::notice;
  std::int32_t from = 0;
  std::int32_t group = every_group;
  std::int32_t about = -1;   ///< the rank that `ask` or `died` is about
  std::uint32_t round = 0;   ///< in a notice or a decision: the last round that the sender has completed
  std::uint32_t serial = 0;  ///< the number of a notice or a decision; its confirmation repeats the number
  // Used in answers:
  std::uint64_t progress = 0;
  std::int32_t waits_for = -1;  ///< the rank that the answering rank waits for
  std::int32_t has_left = 0;    ///< the sender has left the group that the message is about; also used in confirmations
  std::int32_t is_decided = 0;  ///< in a confirmation: `error` is the decision
  std::array<char, 48> phase{};
  WrittenError<1600> error = {};  ///< the cause in a notice, a decision or a confirmation
};
static_assert(std::is_trivially_copyable_v<Control> && sizeof(Control) <= 2048);

}  // namespace muster::hosts

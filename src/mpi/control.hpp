// SPDX-License-Identifier: Apache-2.0
#pragma once
// The small messages of a group between its rounds: who has failed, who has left, whether somebody moves.

#include <array>
#include <cstdint>
#include <type_traits>

#include "muster/error.hpp"

namespace muster::mpi {

enum class ControlKind : std::uint32_t {
  failure = 1,   ///< the group has failed: why
  left = 2,      ///< the sender has left the group
  ask = 3,       ///< a rank that waits asks whether the receiver moves
  answer = 4,    ///< to that
  died = 6,      ///< the sender has seen that a rank of its host is dead
  farewell = 5,  ///< the sender has no group of this communicator any more (family.hpp)
};

/// Instead of a group's number: all groups of the communicator.
inline constexpr std::int32_t every_group = -1;

struct Control {
  ControlKind kind = ControlKind::failure;
  std::int32_t from = 0;
  std::int32_t group = every_group;
  std::int32_t about = -1;  ///< the rank that has died
  // Of an answer.
  std::uint64_t progress = 0;
  std::int32_t waits_for = -1;  ///< the rank that it waits for itself
  std::int32_t has_left = 0;    ///< the group that was asked about
  std::array<char, 48> phase{};
  // Of a failure.
  std::int32_t error_kind = 0;
  std::int32_t error_rank = -1;
  std::int32_t os_error = 0;
  std::int32_t has_pid = 0;
  std::int64_t pid = 0;
  std::array<char, 128> host{};
  std::array<char, 1792> text{};
};
static_assert(std::is_trivially_copyable_v<Control> && sizeof(Control) <= 2048);

Control failure_notice(int from, int group, const Error& cause);
Error to_error(const Control& notice);

}  // namespace muster::mpi

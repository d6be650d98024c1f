// SPDX-License-Identifier: Apache-2.0
#pragma once
// Timeouts of groups, and whether the program wants to cancel the waits of this thread (muster/interrupt.hpp).

#include <chrono>
#include <optional>

#include "muster/sync_group.hpp"

namespace muster::sync {

/// Returns MUSTER_TIMEOUT in seconds (a fraction is allowed), or 10 minutes if it is unset. Throws Error(argument) if
/// it does not parse.
std::chrono::milliseconds default_timeout();

/// About 30 years. Deadlines that far away do not overflow the clock; a longer timeout means no timeout.
constexpr std::chrono::seconds longest_timeout{1'000'000'000};

constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return timeout < longest_timeout ? timeout : longest_timeout;
}
/// Returns the requested timeout, or `otherwise` if none was requested. All waits get their timeouts here.
constexpr std::chrono::milliseconds timeout_of(const std::optional<std::chrono::milliseconds>& asked,
                                               std::chrono::milliseconds otherwise) {
  return bounded(asked.value_or(otherwise));
}
inline std::chrono::milliseconds timeout_of(const WaitOptions& options, const SyncGroup& group) {
  return timeout_of(options.timeout, group.timeout());
}

/// A wait sleeps at most this long between two checks for an interrupt.
inline constexpr std::chrono::milliseconds between_questions{40};

/// Returns whether the program wants to cancel the waits of this thread.
bool is_interrupted() noexcept;

/// Throws Error(cancelled) if is_interrupted(). `phase` names the operation in the message.
void check_interrupted(const char* phase);

/// Sleeps, and checks for an interrupt meanwhile. Throws as check_interrupted().
void sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase);

}  // namespace muster::sync

// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long the waits of groups are, and whether the program wants those of this thread to end (muster/interrupt.hpp).

#include <chrono>
#include <optional>

#include "muster/sync_group.hpp"

namespace muster::sync {

/// MUSTER_TIMEOUT in seconds (a fraction is allowed), else 10 minutes. Throws Error(argument) if it does not parse.
std::chrono::milliseconds default_timeout();

/// 30 years: deadlines that far off do not overflow the clock, and whoever asks for longer means for ever.
constexpr std::chrono::seconds longest_timeout{1'000'000'000};

constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return timeout < longest_timeout ? timeout : longest_timeout;
}
/// What was asked for, else `otherwise`. All waits take theirs from here.
constexpr std::chrono::milliseconds timeout_of(const std::optional<std::chrono::milliseconds>& asked,
                                               std::chrono::milliseconds otherwise) {
  return bounded(asked.value_or(otherwise));
}
inline std::chrono::milliseconds timeout_of(const WaitOptions& options, const SyncGroup& group) {
  return timeout_of(options.timeout, group.timeout());
}

/// So long a wait sleeps at most between two questions whether it is interrupted.
inline constexpr std::chrono::milliseconds between_questions{40};

/// Whether the program wants the waits of this thread to end.
bool is_interrupted() noexcept;

/// Throws Error(cancelled) if it does. `phase`: what is waited for.
void check_interrupted(const char* phase);

/// Sleeps, and asks meanwhile: throws as check_interrupted().
void sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase);

}  // namespace muster::sync

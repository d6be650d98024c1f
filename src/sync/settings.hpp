// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the environment says about groups.

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

}  // namespace muster::sync

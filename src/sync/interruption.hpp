// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether the program wants the waits of this thread to end (muster/interrupt.hpp).

#include <chrono>

namespace muster::sync {

/// So long a wait sleeps at most between two of these questions.
inline constexpr std::chrono::milliseconds between_questions{40};

bool is_interrupted() noexcept;

/// Throws Error(cancelled) if it does. `phase`: what is waited for.
void check_interrupted(const char* phase);

/// Sleeps, and asks meanwhile: throws as check_interrupted().
void sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase);

}  // namespace muster::sync

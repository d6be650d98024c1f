// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether the program wants the waits of this thread to end (muster/interrupt.hpp).

namespace muster::sync {

bool is_interrupted() noexcept;

/// Throws Error(cancelled) if it does. `phase`: what is waited for.
void check_interrupted(const char* phase);

}  // namespace muster::sync

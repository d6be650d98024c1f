// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the environment says about groups.

#include <chrono>

namespace muster::sync {

/// MUSTER_TIMEOUT in seconds (a fraction is allowed), else 10 minutes. Throws Error(argument) where it does not parse.
std::chrono::milliseconds default_timeout();

}  // namespace muster::sync

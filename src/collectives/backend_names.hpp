// SPDX-License-Identifier: Apache-2.0
#pragma once
// Backends by the names of muster::dist.

#include <string_view>

#include "muster/sync_group.hpp"

namespace muster::collectives {

/// Throws Error(argument) if there is no such backend, Error(unsupported) if this program has not got it.
void check_backend_name(std::string_view name);
/// Also Error(unsupported) if that backend does not reach all ranks of the group. Local, the same on all ranks.
void check_backend(std::string_view name, const SyncGroup& group);

}  // namespace muster::collectives

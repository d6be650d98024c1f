// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the ranks of a job form a group from a backend and an init method, which have the names of torch.distributed.

#include <memory>
#include <string>
#include <string_view>

#include "muster/compat/dist.hpp"

namespace muster::collectives {

/// Throws Error(argument) if the backend does not exist, Error(unsupported) if this program does not contain it.
void check_backend_name(std::string_view name);
/// Throws Error(argument) if it is not a valid init method.
void check_init_method(const std::string& method);
/// Checks the name, and throws Error(unsupported) if that backend does not reach all ranks of the group. Local. All
/// ranks get the same result.
void check_backend(std::string_view name, const SyncGroup& group);

/// Collective over the job. Throws as dist::init_process_group().
std::shared_ptr<SyncGroup> init_group(std::string_view backend, const dist::InitOptions& options);

}  // namespace muster::collectives

// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the ranks of a job meet by the names of torch.distributed: a backend and an init method.

#include <memory>
#include <string>
#include <string_view>

#include "muster/dist.hpp"

namespace muster::collectives {

/// Throws Error(argument) if there is no such backend, Error(unsupported) if this program has not got it.
void check_backend_name(std::string_view name);
/// Throws Error(argument) if it is none.
void check_init_method(const std::string& method);
/// Also Error(unsupported) if that backend does not reach all ranks of the group. Local, the same on all ranks.
void check_backend(std::string_view name, const SyncGroup& group);

/// Collective over the job. Throws as dist::init_process_group().
std::shared_ptr<SyncGroup> init_group(std::string_view backend, const dist::InitOptions& options);

}  // namespace muster::collectives

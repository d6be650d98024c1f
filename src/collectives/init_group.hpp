// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the ranks of a job meet by the names of torch.distributed: a backend and an init method.

#include <memory>
#include <string_view>

#include "muster/dist.hpp"

namespace muster::collectives {

/// Collective over the job. Throws as dist::init_process_group().
std::shared_ptr<SyncGroup> init_group(std::string_view backend, const dist::InitOptions& options);

}  // namespace muster::collectives

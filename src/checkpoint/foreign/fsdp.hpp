// SPDX-License-Identifier: Apache-2.0
#pragma once
// What each rank of FSDP has, one file of torch.save a rank: model_world_size_W_rank_R.pt.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/checkpoint/foreign/checkpoint.hpp"

namespace muster::foreign {

/// The files of all ranks in their order; none if `names` has none. Throws Error(not_found) if a rank is missing,
/// Error(argument) if there are those of several jobs.
std::vector<std::string> fsdp_files(const std::string& directory, const std::vector<std::string>& names);
/// The parts of ranks put together: they say themselves where they belong.
std::shared_ptr<const PartedTensors> open_fsdp(const Found& found, const Choice& choice);

}  // namespace muster::foreign

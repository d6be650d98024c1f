// SPDX-License-Identifier: Apache-2.0
#pragma once
// FSDP checkpoints with one torch.save file per rank: model_world_size_W_rank_R.pt.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/checkpoint/thirdparty/checkpoint.hpp"

namespace muster::thirdparty {

/// Returns the files of all ranks in their order; empty if `names` has none. Throws Error(not_found) if a rank is
/// missing, and Error(invalid_argument) if there are files of several jobs.
std::vector<std::string> fsdp_files(const std::string& directory, const std::vector<std::string>& names);
/// Joins the parts of all ranks. The files record the position of each part.
std::shared_ptr<const PartedTensors> open_fsdp(const FoundCheckpoint& found, const Choice& choice);

}  // namespace muster::thirdparty

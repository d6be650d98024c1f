// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of ranks that do not say themselves how they belong together: a plan merges them, as it does the shards of this
// program.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/checkpoint/foreign/checkpoint.hpp"

namespace muster::foreign {

/// Ranks by the names of files: consolidated.00.pth, model-rank-0-part-0.safetensors, rank0.safetensors beside a
/// config.json of TensorRT-LLM, or as `pattern` says: a name with {rank} in it, and {part} if a rank has several. None
/// if there are no such files. Throws Error(not_found) if a rank is missing, Error(argument) if a pattern is none.
std::optional<Found> find_rank_files(const std::string& directory, const std::vector<std::string>& names,
                                     const std::string& pattern);
/// Megatron's folders of ranks, among `folders`: mp_rank_TT[_PPP[_EEE]]/model_optim_rng.pt.
std::optional<Found> find_megatron_ranks(const std::string& directory, const std::vector<std::string>& folders);

/// What a rank has: all tensors of its files.
std::shared_ptr<const PartedTensors> open_rank_files(const Found& found, int rank, const Choice& choice);

}  // namespace muster::foreign

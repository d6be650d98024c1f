// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of ranks that do not record how they belong together: a plan merges them, like Muster's own shards.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/checkpoint/thirdparty/checkpoint.hpp"

namespace muster::thirdparty {

/// Recognises ranks by file names: consolidated.00.pth, model-rank-0-part-0.safetensors, rank0.safetensors next to a
/// config.json of TensorRT-LLM, or names that match `pattern`. A pattern is a name with {rank} in it, and {part} if a
/// rank has several files. Returns nullopt if there are no such files. Throws Error(not_found) if a rank is missing,
/// and Error(invalid_argument) if the pattern is not valid.
std::optional<FoundCheckpoint> find_rank_files(const std::string& directory, const std::vector<std::string>& names,
                                               const std::string& pattern);
/// Recognises Megatron's folders of ranks among `folders`: mp_rank_TT[_PPP[_EEE]]/model_optim_rng.pt.
std::optional<FoundCheckpoint> find_megatron_ranks(const std::string& directory,
                                                   const std::vector<std::string>& folders);

/// Opens all tensors of a rank's files.
std::shared_ptr<const PartedTensors> open_rank_files(const FoundCheckpoint& found, int rank, const Choice& choice);

}  // namespace muster::thirdparty

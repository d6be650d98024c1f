// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints of torch.distributed.checkpoint, Megatron's torch_dist among them.

#include <memory>
#include <string>
#include <vector>

#include "src/checkpoint/foreign/checkpoint.hpp"

namespace muster::foreign {

/// Names of the files that say what a checkpoint has: .metadata, or one a rank; none if there are none among `names`.
std::vector<std::string> dcp_metadata_files(const std::vector<std::string>& names);
/// `found.files` are those. Throws Error(unsupported) on what is stored transformed, and as open_checkpoint.
std::shared_ptr<const PartedTensors> open_dcp(const Found& found, const Choice& choice,
                                              std::vector<std::string>& notes);
/// Likewise of HuggingFaceStorageWriter's shard-*.safetensors, which have no .metadata.
std::shared_ptr<const PartedTensors> open_dcp_shards(const Found& found);

}  // namespace muster::foreign

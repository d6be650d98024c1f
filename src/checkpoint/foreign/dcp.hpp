// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints of torch.distributed.checkpoint, including Megatron's torch_dist.

#include <memory>
#include <string>
#include <vector>

#include "src/checkpoint/foreign/checkpoint.hpp"

namespace muster::foreign {

/// Returns the names of the metadata files: .metadata, or one per rank; empty if `names` has none.
std::vector<std::string> dcp_metadata_files(const std::vector<std::string>& names);
/// `found.files` are the metadata files. Throws Error(unsupported) if stored data is transformed, and as
/// open_checkpoint.
std::shared_ptr<const PartedTensors> open_dcp(const Found& found, const Choice& choice,
                                              std::vector<std::string>& notes);
/// Opens shard-*.safetensors files of HuggingFaceStorageWriter, which have no .metadata. Throws as open_checkpoint.
std::shared_ptr<const PartedTensors> open_dcp_shards(const Found& found);

}  // namespace muster::foreign

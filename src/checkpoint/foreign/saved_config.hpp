// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sizes of a model that other programs save beside its tensors, for plans that need them.

#include <optional>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/foreign/checkpoint.hpp"

namespace muster::foreign {

/// Under the names that HuggingFace's config.json has: from the arguments that Megatron saves with a checkpoint
/// (DeepSpeed saves them, too, if Megatron runs in it), from Meta's params.json, and from TensorRT-LLM's config.json.
/// None if the checkpoint has none of these. A note names the file.
std::optional<Config> saved_config(const Found& found, std::vector<std::string>& notes);

/// Keys for the conditions of plans, which are true of this checkpoint whatever config.json counts: how TensorRT-LLM
/// has cut the embeddings, "embeddings_by_rows" or "embeddings_by_columns".
Config saved_facts(const Found& found);

}  // namespace muster::foreign

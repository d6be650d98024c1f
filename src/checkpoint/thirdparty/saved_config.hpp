// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads the sizes of a model that other programs save with its tensors, for plans that need them.

#include <optional>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"

namespace muster::thirdparty {

/// Returns the sizes under the names of Hugging Face's config.json, or nullopt if the checkpoint has none. They come
/// from the arguments that Megatron (also under DeepSpeed) saves with a checkpoint, from Meta's params.json, or from
/// TensorRT-LLM's config.json. Adds a note that names the file.
std::optional<Config> saved_config(const FoundCheckpoint& found, std::vector<std::string>& notes);

/// Returns keys for the conditions of plans that hold for this checkpoint, whichever config.json is used. They state
/// how TensorRT-LLM has cut the embeddings: "embeddings_by_rows" or "embeddings_by_columns".
Config saved_facts(const FoundCheckpoint& found);

}  // namespace muster::thirdparty

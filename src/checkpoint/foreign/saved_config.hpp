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
/// (DeepSpeed saves them, too, if Megatron runs in it), and from Meta's params.json. None if the checkpoint has
/// neither. A note names the file.
std::optional<Config> saved_config(const Found& found, std::vector<std::string>& notes);

}  // namespace muster::foreign

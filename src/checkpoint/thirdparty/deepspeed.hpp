// SPDX-License-Identifier: Apache-2.0
#pragma once
// DeepSpeed's ZeRO: the weights in full precision are in the optimizer's files, flattened and split among the ranks.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/checkpoint/thirdparty/checkpoint.hpp"

namespace muster::thirdparty {

/// Recognises the directory of a tag, or a directory with the file `latest` that names it. `found.files` are the
/// optimizer's files, by rank. Throws Error(not_found) if a rank is missing, and Error(unsupported) if tensors are also
/// cut by model parallelism.
std::optional<FoundCheckpoint> find_deepspeed(const std::string& directory, const std::vector<std::string>& names);
/// Called for a directory that has nothing else. Throws Error(not_found) if `latest` names a missing step.
void check_deepspeed_tag(const std::string& directory, const std::vector<std::string>& names);
std::shared_ptr<const PartedTensors> open_deepspeed(const FoundCheckpoint& found, std::vector<std::string>& notes);

}  // namespace muster::thirdparty

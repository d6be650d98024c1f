// SPDX-License-Identifier: Apache-2.0
#pragma once
// DeepSpeed's ZeRO: the weights in full precision are in the optimizer's files, flat and cut for the ranks.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/checkpoint/foreign/checkpoint.hpp"

namespace muster::foreign {

/// The directory of a tag, or one with the file `latest` that names it. `found.files` are the optimizer's, by rank.
/// Throws Error(not_found) if a rank is missing, Error(unsupported) if tensors are cut for ranks, too.
std::optional<Found> find_deepspeed(const std::string& directory, const std::vector<std::string>& names);
/// Of a directory in which there is nothing else. Throws Error(not_found) if `latest` names a step that is not there.
void check_deepspeed_tag(const std::string& directory, const std::vector<std::string>& names);
std::shared_ptr<const PartedTensors> open_deepspeed(const Found& found, std::vector<std::string>& notes);

}  // namespace muster::foreign

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What stands around the tensors of an export: the config that goes with them, held against them and brought up to
// date.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// `config` is the config.json that will lie beside `model`. Throws Error(argument) if it says that the head is not
/// tied to the embeddings and there is none. Notes say what else does not agree.
void check_base(const Config& config, std::span<const NamedSpec> model, std::vector<std::string>& notes);

/// The text of config.json for these tensors: with the dtype that most of their elements have, and without
/// "quantization_config" if nothing of them is quantised. None if it is right as it is. What was changed is noted.
std::optional<std::string> updated_config(const Config& config, std::span<const NamedSpec> model,
                                          std::vector<std::string>& notes);

}  // namespace muster

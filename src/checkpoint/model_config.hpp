// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a model's config.json says of the sizes of its tensors. What it does not say is never an error.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "muster/config.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// A value by its name, or by a path ("text_config.vocab_size"). A name that is not there is looked for in
/// "text_config", then under the other name that some models have for it. Null if there is none.
const Config* find_in_config(const Config& config, std::string_view path);

/// A number from 1 on; none if there is no such value.
std::optional<std::int64_t> model_number(const Config& config, std::string_view path);

/// Elements of one attention head: "head_dim", else hidden size by heads.
std::optional<std::int64_t> head_size(const Config& config);

/// Holds a model's tensors, with the names of HuggingFace's models, against the plan's config.json: heads, hidden size,
/// vocabulary, layers, intermediate size. Throws Error(argument) that names the tensor, the fields and the numbers.
/// More rows of a vocabulary than config.json says are padding, and no error.
void check_against_config(const MergePlan& plan, std::span<const NamedSpec> model);

}  // namespace muster

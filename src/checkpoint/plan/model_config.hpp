// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sizes of tensors in a model's config.json. A missing value is never an error.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "muster/config.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/model/tensor_source.hpp"

namespace muster {

/// Returns a value by its path: keys and indices of items with dots between them ("layers.0.hidden_size"). A key may
/// contain dots, and takes precedence over a path with the same text. Returns null if the value is missing.
const Config* find_place(const Config& tree, std::string_view place);
/// Returns a value by its name or path, from the model or else from its text model ("text_config", "llm_config",
/// "language_config"). Returns null if it is missing.
const Config* find_here_or_in_text(const Config& config, std::string_view name);
/// Searches as find_here_or_in_text, and then under the alternative names that some models use for a value.
const Config* find_in_config(const Config& config, std::string_view path);

/// Returns the config with the numbers of heads that it omits. They are derived from the shapes of a model's tensors if
/// these determine them, otherwise from the defaults of the architecture. The length of a per-head norm is the size of
/// a head. `ranks` is the number of tensor-parallel ranks that share the matrices of `tensors`, which may be empty.
Config with_sizes(const Config& config, std::span<const NamedSpec> tensors, std::int64_t ranks);
/// Sets a plan's config to with_sizes() of its config and `tensors`.
void fit_to(MergePlan& plan, std::span<const NamedSpec> tensors, std::int64_t ranks = 1);

/// Returns a number of at least 1; nullopt if there is no such value.
std::optional<std::int64_t> model_number(const Config& config, std::string_view path);

/// Returns the size of one attention head: "head_dim", or else the hidden size divided by the number of heads.
std::optional<std::int64_t> head_size(const Config& config);

/// Checks a model's tensors, under the names of Hugging Face's models, against the plan's config.json: heads, hidden
/// size, vocabulary, layers, intermediate size. Throws Error(argument) that names the tensor, the fields and the
/// numbers. More rows of a vocabulary than in config.json are padding, and no error.
void check_against_config(const MergePlan& plan, std::span<const NamedSpec> model);

}  // namespace muster

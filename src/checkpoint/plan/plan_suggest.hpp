// SPDX-License-Identifier: Apache-2.0
#pragma once
// Suggests a plan for a model without a built-in plan, from names and shapes.

#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/model/tensor_source.hpp"

namespace muster {

struct SuggestedPlan {
  std::string text;                 ///< JSON
  std::vector<std::string> unsure;  ///< to be reviewed before use
};

/// Extends the built-in plan that has rules for most of the tensors; the others get rules by their shapes.
/// `is_foreign`: the names are those of another program's ranks, which plans with views read.
SuggestedPlan suggest_plan(std::span<const NamedSpec> model, const Config* model_config, bool is_foreign = false);

}  // namespace muster

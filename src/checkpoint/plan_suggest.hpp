// SPDX-License-Identifier: Apache-2.0
#pragma once
// A plan for a model that no built-in plan is for, as far as names and shapes tell.

#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "src/checkpoint/arrangement.hpp"

namespace muster {

struct SuggestedPlan {
  std::string text;                 ///< JSON
  std::vector<std::string> unsure;  ///< what to look at before it is used
};

/// The built-in plan that has rules for most of the tensors is extended; the others get rules by their shapes.
/// `is_foreign`: the names are those of another program's ranks, which plans with views read.
SuggestedPlan suggest_plan(std::span<const NamedSpec> model, const Config* model_config, bool is_foreign = false);

}  // namespace muster

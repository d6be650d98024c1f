// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which built-in plan a model's config.json stands for.

#include <string_view>

#include "muster/config.hpp"

namespace muster {

/// A built-in plan's name, by "model_type" and "architectures". Local. Throws Error(argument) where there is no config
/// (null), where neither of the two is known (the words list what is), or where they stand for different plans.
std::string_view plan_for_model(const Config* model_config);

}  // namespace muster

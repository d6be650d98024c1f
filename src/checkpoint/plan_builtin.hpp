// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plans that the program brings along: the same text as a file's, read by the same parser.

#include <string>
#include <string_view>

namespace muster {

struct BuiltinPlan {
  std::string_view name;
  std::string json;
};

/// Null where there is none of that name. Local.
const BuiltinPlan* find_builtin_plan(std::string_view name);

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plans that the program brings along: the same text as a file's, read by the same parser.

#include <span>
#include <string_view>

namespace muster {

struct BuiltinPlan {
  std::string_view name;
  std::string_view json;
};

std::span<const BuiltinPlan> builtin_plans() noexcept;

}  // namespace muster

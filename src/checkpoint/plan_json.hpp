// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plans as JSON text, read and checked. The format: docs/plans.md.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "muster/plan.hpp"

namespace muster {

/// Sums of a few of them fit 63 bits.
inline constexpr std::int64_t largest_plan_number = std::int64_t{1} << 53;

struct PlanContent {
  std::vector<MergeRule> rules;
  std::optional<Numbering> layers;
  std::optional<Numbering> experts;
};

/// Local. Throws Error(corrupt) on what is no JSON (with line and column) or no plan (with the rule and its line), and
/// Error(version). Words do not say which plan it is.
PlanContent parse_plan(std::string_view json);

/// Throws Error(corrupt) where a rule can never be reached, because the patterns before it fit all that it fits.
/// `lines` are the rules'. Of very many patterns not all pairs are compared.
void check_reachable(const std::vector<MergeRule>& rules, const std::vector<std::size_t>& lines);

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What plan.cpp, plan_json.cpp and plan_names.cpp share, and what they ask config.json for. Everything here is local.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// The plans that the library brings along, from src/checkpoint/plans/: the same text as a file's, by name.
struct BuiltinPlan {
  std::string_view name;
  std::string_view json;
};
std::span<const BuiltinPlan> builtin_plans();
/// Null if there is none of that name.
const BuiltinPlan* find_builtin_plan(std::string_view name);
/// Whether a built-in plan has a rule with the same pattern. They are for many models: nobody misses a tensor for one.
bool is_builtin_rule(const MergeRule& rule);
/// JSON text, {PLAN: {MODEL_TYPE: ARCHITECTURE, ...}, ...}: the models that each of them is for.
std::string_view builtin_models();

/// Sums of a few of them fit 63 bits.
inline constexpr std::int64_t largest_plan_number = std::int64_t{1} << 53;

/// A plan's JSON, read and checked.
struct PlanContent {
  std::string text;  ///< with the rules of the plan that it extends
  std::vector<MergeRule> rules;
  std::optional<Numbering> layers;
  std::optional<Numbering> experts;
};
/// Throws Error(corrupt) on what is no JSON (with line and column) or no plan (with the rule and its line), and
/// Error(version). Words do not say which plan it is.
PlanContent parse_plan(std::string_view json);

/// The globs that a glob with braces means, at least one. Throws Error(argument) as TensorPattern::glob does.
std::vector<std::string> expand_braces(const std::string& glob);

/// The new names of a rule: text in which `$1` stands for what the pattern's first star (group) does, `$$` for a
/// dollar.
class NewName {
 public:
  /// Throws Error(argument) on a `$` without a number, and on a number that the pattern has no star for.
  NewName(std::string_view text, const TensorPattern& pattern);
  /// `captures` are the pattern's, of the old name.
  [[nodiscard]] std::string apply(const std::vector<std::string_view>& captures) const;
  /// Whether this may give a name. Then old_name() says from which: the rule gives it back if it is the rule of that
  /// name, and only then.
  [[nodiscard]] bool fits(std::string_view new_name) const;
  /// Throws Error(argument), with the reason alone, if there is no way back.
  [[nodiscard]] std::string old_name(std::string_view new_name) const;

 private:
  /// Literal text, or the capture with that index (from 0 on).
  struct Part {
    std::string text = {};
    std::size_t group = 0;
    bool is_group = false;
  };
  std::vector<Part> parts_;
  std::string pattern_;                    // without braces
  std::shared_ptr<const re2::RE2> regex_;  // fits the new names; a group for each part that is one
  std::string_view no_way_back_;           // why; empty: there is one
};

// What a model's config.json says of the sizes of its tensors. What it does not say is never an error.

/// A value by its place: keys and numbers of items with dots between them ("layers.0.hidden_size"). A key may have dots
/// of its own, and counts before the path that it looks like. Null if there is none.
const Config* find_place(const Config& tree, std::string_view place);
/// A value by its name or its place ("text_config.vocab_size"). A name that is not there is looked for in
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

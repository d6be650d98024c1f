// SPDX-License-Identifier: Apache-2.0
#pragma once
// Functions that plan.cpp, plan_json.cpp and plan_names.cpp share, and their queries of config.json. Everything here is
// local.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/plan.hpp"

namespace muster {

/// The built-in plans, from src/checkpoint/plan/builtin/: the same text as a plan file, by name.
struct BuiltinPlan {
  std::string_view name;
  std::string_view json;
};
std::span<const BuiltinPlan> builtin_plans();
/// Returns null if no plan has that name.
const BuiltinPlan* find_builtin_plan(std::string_view name);
/// Returns the rules that a rule of a plan's JSON represents. For a linear layer (the actions "column" and "row") they
/// are the rules of its tensors; any other rule is returned unchanged. Throws Error(corrupt).
std::vector<Config> single_rules(const Config& rule);
/// Whether a built-in plan has a rule with the same pattern. Built-in rules cover many models, so an unused one is not
/// reported.
bool is_builtin_rule(const MergeRule& rule);
/// JSON text, {PLAN: {MODEL_TYPE: ARCHITECTURE, ...}, ...}: the models of each built-in plan.
std::string_view builtin_models();
/// The parsed text of builtin_defaults().
const Config& default_sizes();
/// JSON text, {MODEL_TYPE: {KEY: NUMBER, ...} | MODEL_TYPE of its text model, ...}: the values that config.json may
/// omit.
std::string_view builtin_defaults();

/// The limit of a plan's text in bytes.
inline constexpr std::uint64_t longest_plan = 4 << 20;

/// The limit of a number in a plan. Sums of a few such numbers fit 63 bits.
inline constexpr std::int64_t largest_plan_number = std::int64_t{1} << 53;

/// Returns a number of a plan. Throws Error(invalid_argument), whose message begins with `where`, if config.json lacks
/// it or its value is not a number.
std::int64_t plan_number(const MergePlan& plan, const PlanNumber& number, std::string_view where);

/// Returns the number of equal units into which the `count` heads of a tensor are split for `parts` ranks. A rank with
/// whole groups of heads has the key-value head of each group. A rank with parts of two groups would lack one. Returns
/// nullopt if no cut keeps the heads of a group with their key-value head.
std::optional<std::int64_t> head_units(const MergePlan& plan, const PlanNumber& heads, std::int64_t count,
                                       std::int64_t parts);
/// Returns the error message for a rule whose number of heads is unknown.
std::string unknown_heads_words(const MergePlan& plan, const PlanNumber& heads, int parts);

/// Whether the rule excludes its tensors from the result.
bool is_left_out(const MergeRule& rule);

/// Expands the braces of a glob; returns at least one glob. Throws Error(invalid_argument) as TensorPattern::glob does.
std::vector<std::string> expand_braces(const std::string& glob);
/// Returns one glob that matches a name if any of the globs does; the glob itself if there is only one. Throws
/// Error(invalid_argument) as TensorPattern::glob, and if one of several globs has a comma outside braces.
std::string any_of_globs(std::span<const std::string> globs);

/// The new names of a rule: text in which `$1` represents the match of the pattern's first star (group), and `$$` for a
/// dollar.
class NewName {
 public:
  /// Throws Error(invalid_argument) on a `$` without a number, and on a number without a corresponding star.
  NewName(std::string_view text, const TensorPattern& pattern);
  /// `captures` are the pattern's matches in the old name.
  [[nodiscard]] std::string apply(const std::vector<std::string_view>& captures) const;
  /// Whether the rule may produce this name. Then old_name() returns the only possible origin, which is correct if the
  /// plan applies this rule to it.
  [[nodiscard]] bool fits(std::string_view new_name) const;
  /// Returns the old name. Throws Error(invalid_argument) with the reason alone if the renaming is not invertible.
  [[nodiscard]] std::string old_name(std::string_view new_name) const;
  /// Returns the text as written in the plan.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  /// Literal text, or the capture with that index (from 0 on).
  struct TemplatePart {
    std::string text = {};
    std::size_t group = 0;
    bool is_group = false;
  };
  std::string text_;
  std::vector<TemplatePart> parts_;
  std::string pattern_;                    // without braces
  std::shared_ptr<const re2::RE2> regex_;  // matches the new names; has one group for each part that is a capture
  std::string_view not_invertible_;        // the reason why the renaming is not invertible; empty if it is
};

}  // namespace muster

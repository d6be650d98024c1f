// SPDX-License-Identifier: Apache-2.0
#pragma once
// MergePlan: how the tensors of N ranks become those of one checkpoint, and back. Ordered rules, the first match wins.
// Written as a JSON file; format and built-in plans: docs/plans.md.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace re2 {
class RE2;
}

namespace muster {

/// The ranks' pieces one after the other along a dimension (negative: counted from the last). Backwards: equal slices,
/// the last ones padded with zeros where the size does not divide.
struct ConcatRule {
  std::int64_t dim = 0;
};
/// Every rank has the whole tensor, bit for bit the same. Backwards: every rank gets it.
struct SameRule {};
/// Rank 0 has it, whatever the others have. It has no way back.
struct FirstRule {};

using MergeAction = std::variant<ConcatRule, SameRule, FirstRule>;

/// "concat", "same", "first".
std::string_view action_name(const MergeAction& action) noexcept;

/// Which tensor names a rule is for; always the whole name, never a part of it.
class TensorPattern {
 public:
  /// `*` stands for any characters, dots too; `{a,b}` for one of several words. Throws Error(argument) where braces do
  /// not pair, nest, or mean more than 256 patterns.
  static TensorPattern glob(std::string text);
  /// A regular expression of at most 1024 characters in ECMAScript's syntax, without back-references and look-ahead, so
  /// that matching takes linear time. Throws Error(argument) where it is not one.
  static TensorPattern regex(std::string text);

  [[nodiscard]] bool matches(std::string_view name) const;
  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] bool is_regex() const noexcept { return regex_ != nullptr; }

 private:
  std::string text_;
  std::vector<std::string> globs_;  // without braces
  std::shared_ptr<const re2::RE2> regex_;
};

struct MergeRule {
  TensorPattern pattern;
  MergeAction action;
};

/// Local; immutable once made; may be shared by threads.
class MergePlan {
 public:
  /// `name` is what messages call it. Throws Error(corrupt) where the text is no JSON (with line and column) or the
  /// JSON no plan (with the rule's number).
  static MergePlan parse(std::string_view json, std::string name);
  /// A built-in plan's name, or a file. Throws Error(not_found) with the names that there are, Error(io), and as parse.
  static MergePlan load(const std::string& name_or_file);
  static std::span<const std::string_view> builtin_names() noexcept;

  /// The first rule for a tensor; null where there is none.
  [[nodiscard]] const MergeRule* find(std::string_view tensor) const;
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::vector<MergeRule>& rules() const noexcept { return rules_; }

 private:
  std::string name_;
  std::vector<MergeRule> rules_;
};

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// MergePlan: how the tensors of N ranks become the tensors of one checkpoint, and the inverse. A plan is an ordered
// list of rules, of which the first match applies. docs/reference/plans.md describes the JSON format, and
// docs/reference/builtin-plans.md lists the built-in plans.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "muster/config.hpp"
#include "muster/merge.hpp"
#include "muster/tensor.hpp"

namespace re2 {
class RE2;
}

namespace muster {

/// A positive number in a plan: either a literal, or the name of a number in config.json of the model ("vocab_size", or
/// with a path, "text_config.vocab_size").
struct PlanNumber {
  /// The literal number.
  std::int64_t value = 0;
  std::string key = {};  ///< name in config.json; empty: `value` is used
  friend bool operator==(const PlanNumber&, const PlanNumber&) = default;
};

/// Concat (merge.hpp) with numbers that may come from config.json.
struct ConcatAction {
  /// The dimension, as merge::Concat::dim.
  std::int64_t dim = 0;
  std::vector<PlanNumber> blocks = {};  ///< relative sizes of the parts of a fused tensor
  std::optional<PlanNumber> trim = {};  ///< true extent of the whole tensor along dim; padding beyond it is removed
  /// The number of attention heads along dim: of the tensor, or of each part of a fused tensor (instead of `blocks`).
  /// Heads are never split. If the number of ranks is a multiple of the number of heads, neighbouring ranks hold the
  /// same head.
  std::vector<PlanNumber> heads = {};
  std::vector<PlanNumber> head_sizes = {};  ///< relative sizes of a head of each part; empty: all are equal
  friend bool operator==(const ConcatAction&, const ConcatAction&) = default;
};
/// Merges a quantization scale of a weight, or of the input of a weight, that is split along `dim`. The kind of merge
/// depends on the shapes:
/// - concat along `dim`, if a rank has more than one element along it, or a separate quantization block (MergeFacts);
/// - otherwise max, if every rank has one element;
/// - otherwise, and always without `dim`, same.
///
/// The inverse copies a single element to all ranks. Semantics: the table of merge rules in export/postprocess.py of
/// ModelOpt. ModelOpt takes the maximum of several elements. Here the ranks must agree, because weights that are
/// already quantized would be wrong with another scale.
struct ScaleAction {
  std::optional<std::int64_t> dim = {};  ///< unset: the scale is not split
  std::vector<PlanNumber> blocks = {};   ///< as ConcatAction::blocks: the scale of a fused tensor is fused too
  std::vector<PlanNumber> heads = {};    ///< as ConcatAction::heads; ignored if blocks span several heads
  /// As ConcatAction::head_sizes.
  std::vector<PlanNumber> head_sizes = {};
  friend bool operator==(const ScaleAction&, const ScaleAction&) = default;
};
/// Omits the tensor from the result and counts it in the report. Not invertible.
struct DropAction {
  std::string reason = {};  ///< for the report
  friend bool operator==(const DropAction&, const DropAction&) = default;
};

/// Requires that the tensor equals another one, which `rename` names, bit by bit on every rank, and omits it. Use it
/// for a head that is tied to the embeddings. Not invertible.
struct TieAction {
  friend bool operator==(const TieAction&, const TieAction&) = default;
};

/// The action of a rule.
using MergeAction = std::variant<ConcatAction, merge::Same, merge::First, merge::Max, merge::Sum, merge::Stack,
                                 ScaleAction, DropAction, TieAction>;

/// Returns "concat", "same", "first", "max", "sum", "stack", "scale", "drop" or "tie".
std::string_view action_name(const MergeAction& action) noexcept;

/// The pipeline stages that hold a tensor which belongs to no layer.
enum class Stage : std::uint8_t {
  first,  ///< the first stage (embeddings)
  last,   ///< the last stage (head, final norm)
  ends,   ///< the first and the last stage, with equal tensors (tied embeddings)
  all,    ///< every stage, with equal tensors
};

/// The ranks whose tensors the action of a rule joins. Ranks that differ only in other coordinates must have equal
/// tensors.
enum class Axis : std::uint8_t { tensor, expert };

/// Matches tensor names. A pattern always matches the whole name, never a part of it.
class TensorPattern {
 public:
  /// Parses a glob of at most 1024 characters. `*` matches any characters, including dots; `{a,b}` matches one of
  /// several words. Throws Error(invalid_argument) if the text is longer, if braces are unbalanced or nested, or if it
  /// expands to more than 256 patterns.
  static TensorPattern glob(std::string text);
  /// Parses a regular expression of at most 1024 characters in RE2 syntax. RE2 has no back-references and no
  /// look-ahead, so matching takes linear time. Throws Error(invalid_argument) if the expression is invalid.
  static TensorPattern regex(std::string text);

  /// Returns whether the pattern matches the whole name.
  [[nodiscard]] bool matches(std::string_view name) const;
  /// Returns the text that was parsed.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  /// Returns whether the pattern is a regular expression.
  [[nodiscard]] bool is_regex() const noexcept { return is_regex_; }

  /// Returns the number of captured parts of a match: the stars of a glob, or the groups of a regular expression.
  /// Returns nullopt if the alternatives in braces contain different numbers of stars.
  [[nodiscard]] std::optional<std::size_t> groups() const;
  /// Returns the captured parts as views of `name`; nullopt if the name does not match. From left to right, each star
  /// matches as few characters as possible.
  [[nodiscard]] std::optional<std::vector<std::string_view>> captures(std::string_view name) const;

 private:
  std::string text_;
  std::shared_ptr<const re2::RE2> regex_;
  bool is_regex_ = false;
};

/// Locates a number in the name of a tensor: a glob in which a single `#` (outside braces) matches the digits,
/// "*layers.#.*".
class NumberPattern {
 public:
  /// Parses a pattern. Throws Error(invalid_argument) if it does not contain exactly one `#`, or as
  /// TensorPattern::glob().
  static NumberPattern parse(std::string text);
  /// Returns the number in a name (at most 18 digits, no leading zeros); nullopt if the pattern does not match the
  /// whole name. If several positions match, it is the first.
  [[nodiscard]] std::optional<std::int64_t> find(std::string_view name) const;
  /// Returns the name with another number at that position. Throws Error(invalid_argument) if find() returns nullopt.
  [[nodiscard]] std::string replace(std::string_view name, std::int64_t number) const;
  /// Returns the text that was parsed.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
  std::shared_ptr<const re2::RE2> regex_;
};

/// The position of a layer or expert number in the names on the ranks, before a rule renames them. Parallel ranks
/// divide these numbers among them.
struct Numbering {
  /// Matches the names and locates the number.
  NumberPattern pattern;
  bool renumber = false;  ///< each pipeline stage (each expert rank) counts its own layers (experts) from 0
  /// Matches tensors of the last pipeline stage that belong to no layer, whatever numbers their names contain: the
  /// layers for multi-token prediction.
  std::optional<TensorPattern> last = {};
  /// Returns the number in a name; nullopt if `last` matches the name or `pattern` does not.
  [[nodiscard]] std::optional<std::int64_t> find(std::string_view name) const;
};

class NewName;

/// A rule of a plan: the tensors that it matches, and the action that joins them.
struct MergeRule {
  /// The names on the ranks that the rule applies to.
  TensorPattern pattern;
  /// The action that joins the tensors of the ranks.
  MergeAction action;
  /// Null: the name does not change (MergePlan::renamed); for TieAction: the other tensor.
  std::shared_ptr<const NewName> rename = {};
  /// The pipeline stages that hold a matching tensor, if it belongs to no layer.
  Stage stage = Stage::first;
  /// The ranks whose tensors are joined.
  Axis across = Axis::tensor;
  std::size_t number = 0;      ///< number of the rule in the plan, from 1, for messages
  std::string condition = {};  ///< a flag of config.json; without the flag the rule is skipped; empty: no condition
};

/// Transforms a tensor of a rank into one or several tensors that rules match. The transform runs before tensors of
/// several ranks are joined, and its inverse after a tensor has been split for them. The steps that are present run in
/// this order: unstack, transpose, split, permute, cast.
struct ViewRule {
  /// Splits a tensor into parts along `dim`:
  /// - blocks: `counts` are the relative sizes of the parts;
  /// - heads: `counts` are the numbers of heads of the parts in the whole model, as in ConcatAction;
  /// - groups: each group stores its heads of every part, one group after the other, as query, key and value in
  ///   Megatron;
  /// - gated_groups: as groups, but the query heads of a group are followed by the same number of gate heads. After the
  ///   split, each query head is directly followed by its gate.
  struct Split {
    /// How the parts are stored.
    enum class By : std::uint8_t { blocks, heads, groups, gated_groups };
    /// How the parts of this tensor are stored.
    By by = By::blocks;
    /// The dimension that is split.
    std::int64_t dim = 0;
    /// The relative sizes or numbers of heads of the parts.
    std::vector<PlanNumber> counts;
  };
  /// The names on the ranks that the transform applies to.
  TensorPattern pattern;
  std::vector<std::shared_ptr<const NewName>> to = {};  ///< one name per part; empty: the name does not change
  /// The number of leading dimensions, at most 2, whose items become separate tensors. Their indices replace the `#` in
  /// `to`.
  int unstack = 0;
  bool transpose = false;  ///< swaps the last two dimensions
  /// The split. Unset: the tensor is not split.
  std::optional<Split> split = {};
  /// The number of heads whose rows are permuted for rotary embeddings. Meta stores the two rows of a rotated pair next
  /// to each other; the result has the two halves one after the other, as Hugging Face does.
  std::optional<PlanNumber> permute_rope = {};
  std::optional<DType> cast = {};        ///< f32, f16 or bf16; integers are not cast
  bool may_overflow = false;             ///< numbers that are too large for `cast` become infinity instead of an error
  std::optional<std::string> drop = {};  ///< omits the tensor, for this reason; no other step is then present
  std::size_t number = 0;                ///< number among the views of the plan, from 1
};

/// Facts about a tensor in addition to its name and shapes.
struct MergeFacts {
  std::span<const TensorSpec> weight = {};  ///< for a scale: the specs of its weight on the same ranks
  /// The dimension that the tensor was split along, according to the rank shards.
  std::optional<std::size_t> cut_along = {};
  bool is_whole = false;  ///< for a scale: each rank holds all of it, according to the rank shards
  int parts = 1;          ///< for the inverse: the number of ranks that the whole tensor is split for
};

/// The action of a rule for tensors of particular shapes, with all numbers resolved.
struct ResolvedMerge {
  /// The merge with literal numbers.
  Merge merge;
  /// Extent of the whole tensor along the dimension of Concat, without padding.
  std::optional<std::int64_t> true_size = {};
  /// Heads of each block along the dimension of Concat; empty: without heads, or unknown.
  std::vector<std::int64_t> heads = {};
  /// The extent of a unit that `heads` counts, in elements along the dimension of Concat. For fused blocks, it is the
  /// extent of each of `blocks` divided by its `heads`. 0: unknown.
  std::int64_t head_size = 0;
  /// For a scale: the number of elements of its weight, along the dimension of the rule, per element of the scale.
  std::int64_t block = 0;
};

/// A merge plan. All functions are local. A plan does not change after it has been created, except by
/// set_model_config(), and threads may share it.
class MergePlan {
 public:
  /// Parses a plan. Messages refer to it by `name`; `model_config` is as for load(). Throws Error(corrupt), with line
  /// and column, if the text is not valid JSON. Throws Error(corrupt), with the number and the line of the rule, if the
  /// JSON is not a valid plan or rules contradict each other.
  static MergePlan parse(std::string_view json, std::string name, const Config* model_config = nullptr);
  /// Loads a plan by the name of a built-in plan, "auto", or the path of a file. `model_config` is config.json of the
  /// model, or null if it does not exist; it supplies the numbers that the plan refers to. "auto" selects the built-in
  /// plan for the "model_type" or "architectures" of config.json; the plan then has that name. A plan in a file may
  /// extend another one in the same directory. Throws Error(not_found), with the available names, if the plan does not
  /// exist. Throws Error(invalid_argument) if "auto" has no config.json, recognizes neither entry, or the entries
  /// select different plans. Throws Error(io), and as parse().
  static MergePlan load(const std::string& name_or_file, const Config* model_config = nullptr);
  /// Returns the names of the built-in plans, without "auto".
  static std::span<const std::string_view> builtin_names() noexcept;

  /// Returns the first rule that matches a tensor and whose condition config.json meets; null if no rule does.
  [[nodiscard]] const MergeRule* find(std::string_view tensor) const;
  /// Returns the name in the result that a rule gives to a tensor.
  [[nodiscard]] static std::string renamed(const MergeRule& rule, std::string_view tensor);
  /// The origin of a tensor of the result.
  struct Origin {
    /// The name on the ranks.
    std::string name;
    /// The rule that joins the tensor.
    const MergeRule* rule = nullptr;
  };
  /// Inverts the rules: returns the name on the ranks of a tensor of the result, and its rule. Applying the rules to
  /// that name gives `result` again. If several rules do so, it is the first; nullopt if no rule does. Throws
  /// Error(invalid_argument) if a matching rule with `rename` is not invertible (regular expressions, braces of several
  /// words, a star that the new name omits or repeats).
  [[nodiscard]] std::optional<Origin> origin(std::string_view result) const;
  /// Resolves the numbers of a rule. `tensor` is the name on the ranks. `specs` are the specs of all ranks that the
  /// rule joins. For the inverse, `whole` is true and `specs` has only the spec of the whole tensor. If config.json
  /// lacks a number of `heads`, it is unknown, unless the tensor is fused.
  ///
  /// Throws Error(invalid_argument) if:
  /// - another number is missing in config.json ("rule 3 needs \"vocab_size\" of config.json") or is not a number;
  /// - `specs` is empty, or the action is DropAction;
  /// - the extent of the whole tensor is not that of `trim`;
  /// - the rule joins, across expert ranks, a tensor that belongs to one expert by its name.
  [[nodiscard]] ResolvedMerge resolve(const MergeRule& rule, std::string_view tensor, std::span<const TensorSpec> specs,
                                      bool whole = false, const MergeFacts& facts = {}) const;
  /// Returns the stages that hold a tensor of this rule if it belongs to no layer.
  [[nodiscard]] Stage stage_of(const MergeRule& rule, std::string_view tensor) const;
  /// Return the positions of layer and expert numbers in names.
  [[nodiscard]] const std::optional<Numbering>& layers() const noexcept { return layers_; }
  /// Returns the position of expert numbers in names.
  [[nodiscard]] const std::optional<Numbering>& experts() const noexcept { return experts_; }
  /// Returns the name of the plan, for messages.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Returns the transforms that run before the rules. The first one that matches the name of a tensor applies.
  [[nodiscard]] const std::vector<ViewRule>& views() const noexcept { return views_; }
  /// Returns the prefix of the names on the ranks, before the views; tensors with other names are omitted. Empty: no
  /// prefix.
  [[nodiscard]] const std::string& at() const noexcept { return at_; }
  /// Returns the rules, in order.
  [[nodiscard]] const std::vector<MergeRule>& rules() const noexcept { return rules_; }
  /// Returns the JSON text of the plan, with the rules of the plan that it extends.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  /// Returns config.json of the model with the omitted numbers of heads filled in; null if there is no config.json.
  [[nodiscard]] const Config& model_config() const noexcept { return model_config_; }
  /// Returns config.json of the model without changes.
  [[nodiscard]] const Config& given_config() const noexcept { return given_config_; }
  /// Replaces model_config().
  void set_model_config(Config config) { model_config_ = std::move(config); }

 private:
  /// Reads a plan without its name and config.json. `beside` is the directory of the plans that it may extend; empty:
  /// none. `depth` is the number of plans that extend this one.
  static MergePlan read(std::string_view json, const std::string& beside = {}, int depth = 0);
  static MergePlan named(std::string_view json, std::string name, const Config* model_config,
                         const std::string& beside);
  std::string name_;
  std::string text_;
  std::string at_;
  std::vector<ViewRule> views_;
  std::vector<MergeRule> rules_;
  std::optional<Numbering> layers_;
  std::optional<Numbering> experts_;
  Config given_config_;
  Config model_config_;
};

}  // namespace muster

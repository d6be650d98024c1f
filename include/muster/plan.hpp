// SPDX-License-Identifier: Apache-2.0
#pragma once
// MergePlan: how the tensors of N ranks become those of one checkpoint, and back. Ordered rules, the first match wins.
// Written as a JSON file; format and built-in plans: docs/plans.md.

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

/// A number of a plan, from 1 on: written there, or the name of one in the model's config.json ("vocab_size", or with
/// a path, "text_config.vocab_size").
struct PlanNumber {
  std::int64_t value = 0;
  std::string key = {};  ///< empty: `value` counts
  friend bool operator==(const PlanNumber&, const PlanNumber&) = default;
};

/// Concat (merge.hpp) with numbers that may come from config.json.
struct ConcatAction {
  std::int64_t dim = 0;
  std::vector<PlanNumber> blocks = {};  ///< relative sizes of the parts of a fused tensor
  std::optional<PlanNumber> trim = {};  ///< the true size along dim of the whole: padding beyond it goes
  /// Attention heads along dim: of the tensor, or of each part of a fused one, then instead of `blocks`. No head is cut
  /// through. If there are more ranks than heads, and a multiple of them, neighbouring ranks have a head each alike.
  std::vector<PlanNumber> heads = {};
  std::vector<PlanNumber> head_sizes = {};  ///< relative sizes of a head of each part; empty: all are equal
  friend bool operator==(const ConcatAction&, const ConcatAction&) = default;
};
/// A quantisation scale of a weight (or of what goes into it) that is cut along `dim`: concat along dim if a rank has
/// more than one element along it or a block of its own (MergeFacts), else max if every rank has one element, else same
/// (and always same if there is no `dim`). Backwards, one element goes to all. Semantics: the table of merge rules in
/// ModelOpt's export/postprocess.py; where that takes the max of several elements, ranks have to agree here: weights
/// that are quantised already would be wrong with another scale.
struct ScaleAction {
  std::optional<std::int64_t> dim = {};  ///< empty: the scale is not cut
  std::vector<PlanNumber> blocks = {};   ///< as ConcatAction's: the scale of a fused tensor is fused too
  std::vector<PlanNumber> heads = {};    ///< as ConcatAction's; left out of account if blocks hold several heads
  std::vector<PlanNumber> head_sizes = {};
  friend bool operator==(const ScaleAction&, const ScaleAction&) = default;
};
/// The tensor is left out of the result, and counted in the report. It has no way back.
struct DropAction {
  std::string reason = {};  ///< for the report
  friend bool operator==(const DropAction&, const DropAction&) = default;
};

/// The tensor has to be another one, which `rename` names, bit for bit on every rank, and is left out: a head that is
/// tied to the embeddings. It has no way back.
struct TieAction {
  friend bool operator==(const TieAction&, const TieAction&) = default;
};

using MergeAction = std::variant<ConcatAction, merge::Same, merge::First, merge::Max, merge::Sum, merge::Stack,
                                 ScaleAction, DropAction, TieAction>;

/// "concat", "same", "first", "max", "sum", "stack", "scale", "drop", "tie".
std::string_view action_name(const MergeAction& action) noexcept;

/// Which pipeline stages have a tensor that belongs to no layer.
enum class Stage : std::uint8_t {
  first,  ///< the first one (embeddings)
  last,   ///< the last one (head, final norm)
  ends,   ///< first and last, equal (tied embeddings)
  all,    ///< every one, equal
};

/// Along which ranks a rule's action joins. Ranks that differ in other coordinates only must have equal tensors.
enum class Axis : std::uint8_t { tensor, expert };

/// Which tensor names a rule is for; always the whole name, never a part of it.
class TensorPattern {
 public:
  /// `*` stands for any characters, dots too; `{a,b}` for one of several words. Throws Error(argument) if braces do
  /// not pair, nest, or mean more than 256 patterns, and beyond 1024 characters.
  static TensorPattern glob(std::string text);
  /// A regular expression of at most 1024 characters in RE2's syntax, without back-references and look-ahead, so that
  /// matching takes linear time. Throws Error(argument) if it is not one.
  static TensorPattern regex(std::string text);

  [[nodiscard]] bool matches(std::string_view name) const;
  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] bool is_regex() const noexcept { return is_regex_; }

  /// How many parts of a name a match has: a glob's stars, a regular expression's groups. None if the braces of a
  /// glob hold different numbers of stars.
  [[nodiscard]] std::optional<std::size_t> groups() const;
  /// Those parts of `name`, which they are views of; none if the name does not match. From the left on each star
  /// takes as few characters as it can.
  [[nodiscard]] std::optional<std::vector<std::string_view>> captures(std::string_view name) const;

 private:
  std::string text_;
  std::shared_ptr<const re2::RE2> regex_;
  bool is_regex_ = false;
};

/// A place in a tensor's name where a number stands: a glob in which one `#` (outside braces) stands for the digits of
/// it, "*layers.#.*".
class NumberPattern {
 public:
  /// Throws Error(argument) if there is not exactly one `#`, or as TensorPattern::glob.
  static NumberPattern parse(std::string text);
  /// The number in a name (at most 18 digits, no leading zeros); none if the pattern does not fit the whole name.
  /// If several places fit, the first.
  [[nodiscard]] std::optional<std::int64_t> find(std::string_view name) const;
  /// The same name with another number there. Throws Error(argument) if find() has none.
  [[nodiscard]] std::string replace(std::string_view name, std::int64_t number) const;
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
  std::shared_ptr<const re2::RE2> regex_;
};

/// Where the ranks' names (before a rule renames them) have a number that parallel ranks divide among them.
struct Numbering {
  NumberPattern pattern;
  bool renumber = false;  ///< each pipeline stage (each expert rank) counts its own from 0
  /// Tensors of the last pipeline stage that belong to no layer, whatever numbers their names have: the layers that
  /// predict further tokens.
  std::optional<TensorPattern> last = {};
  /// The number in a name; none if `last` or not `pattern` matches it.
  [[nodiscard]] std::optional<std::int64_t> find(std::string_view name) const;
};

class NewName;

struct MergeRule {
  TensorPattern pattern;
  MergeAction action;
  std::shared_ptr<const NewName> rename = {};  ///< null: the name stays (MergePlan::renamed); of TieAction: the other
  Stage stage = Stage::first;
  Axis across = Axis::tensor;
  std::size_t number = 0;      ///< its place in the plan, from 1 on: for messages
  std::string condition = {};  ///< a flag of config.json without which the rule is passed over; empty: none
};

/// How a tensor of a rank becomes one or several of those that rules are for: before it is joined with other ranks',
/// and after it has been cut for them. In this order, each if it is there: unstack, transpose, split, permute, cast.
struct ViewRule {
  /// Along `dim` into parts: in the proportion of blocks; of so many heads of the whole model each (as ConcatAction's);
  /// or of groups that each have their share of the heads, one group after the other, as Megatron has query, key and
  /// value. Gated: in each group gates lie behind the first part's heads, as many; with it each head has its own behind
  /// it.
  struct Split {
    enum class By : std::uint8_t { blocks, heads, groups, gated_groups } by = By::blocks;
    std::int64_t dim = 0;
    std::vector<PlanNumber> counts;
  };
  TensorPattern pattern;
  std::vector<std::shared_ptr<const NewName>> to = {};  ///< of each part; empty: the name stays
  /// Of the first so many dimensions (2 at most) each item is a tensor, whose numbers are the `#` in `to`.
  int unstack = 0;
  bool transpose = false;  ///< the last two dimensions change places
  std::optional<Split> split = {};
  /// Rows of so many heads, of which Meta's order has the two halves of a rotation beside each other, HuggingFace's one
  /// after the other.
  std::optional<PlanNumber> permute_rope = {};
  std::optional<DType> cast = {};        ///< f32, f16 or bf16; integers stay as they are
  bool may_overflow = false;             ///< what is too large for that becomes infinity, and is no error
  std::optional<std::string> drop = {};  ///< why; then nothing else is there
  std::size_t number = 0;                ///< its place among the views, from 1 on
};

/// What is known of a tensor beside its name and shapes.
struct MergeFacts {
  std::span<const TensorSpec> weight = {};    ///< of a scale: its weight's, of the same ranks
  std::optional<std::size_t> cut_along = {};  ///< the ranks' shards say that they were cut along this dimension
  bool is_whole = false;                      ///< of a scale: they say that each has all of it
  int parts = 1;                              ///< backwards: how many ranks the whole tensor is cut for
};

/// A rule's action for tensors of certain shapes, with all numbers known.
struct ResolvedMerge {
  Merge merge;
  std::optional<std::int64_t> true_size = {};  ///< along Concat's dim
  std::vector<std::int64_t> heads = {};        ///< of each block along Concat's dim; empty: none, or not known
  /// Elements along Concat's dim of a unit that `heads` counts; of fused blocks, for each of `blocks` by `heads`. 0:
  /// not known.
  std::int64_t head_size = 0;
  std::int64_t block = 0;  ///< of a scale: how many elements of its weight along the rule's dim one of its own is for
};

/// Local; immutable once made; may be shared by threads.
class MergePlan {
 public:
  /// `name` is what messages call it; `model_config` as for load. Throws Error(corrupt) if the text is no JSON (with
  /// line and column), the JSON no plan, or rules contradict each other (with the rule's number and its line).
  static MergePlan parse(std::string_view json, std::string name, const Config* model_config = nullptr);
  /// A built-in plan's name, "auto", or a file. `model_config` is the model's config.json (null: there is none); it
  /// gives the plan the numbers that it names. "auto" takes the built-in plan that "model_type" or "architectures" of
  /// it stand for, and is named after that. A file's plan may extend one in a file beside it. Throws Error(not_found)
  /// with the names that there are, Error(argument) where "auto" has no config.json, knows neither of the two, or they
  /// stand for different plans; Error(io), and as parse.
  static MergePlan load(const std::string& name_or_file, const Config* model_config = nullptr);
  /// Without "auto".
  static std::span<const std::string_view> builtin_names() noexcept;

  /// The first rule for a tensor whose condition config.json meets; null if there is none.
  [[nodiscard]] const MergeRule* find(std::string_view tensor) const;
  /// What a rule calls a tensor in the result.
  [[nodiscard]] static std::string renamed(const MergeRule& rule, std::string_view tensor);
  /// Backwards: the ranks' name of a tensor of the result, and its rule; forwards they give that result again. Where
  /// several rules do, it is the first; none if no rule does. Throws Error(argument) if a rule with `rename` that
  /// fits cannot be turned around (regular expressions, braces of several words, a star that the new name lacks or has
  /// twice).
  struct Origin {
    std::string name;
    const MergeRule* rule = nullptr;
  };
  [[nodiscard]] std::optional<Origin> origin(std::string_view result) const;
  /// `tensor` is the ranks' name. `specs` are those of all ranks that the rule joins (forwards); with `whole` that of
  /// the whole tensor alone (backwards). A number of `heads` that config.json lacks is not known, unless the tensor is
  /// fused. Throws Error(argument) if a number of config.json is missing ("rule 3 needs
  /// \"vocab_size\" of config.json") or is none, if there are no specs, for DropAction, if the whole's size is
  /// not the one that `trim` says, and if a rule joins across expert ranks what belongs to one expert by its name.
  [[nodiscard]] ResolvedMerge resolve(const MergeRule& rule, std::string_view tensor, std::span<const TensorSpec> specs,
                                      bool whole = false, const MergeFacts& facts = {}) const;
  /// The stages that have a tensor of this rule if it belongs to no layer.
  [[nodiscard]] Stage stage_of(const MergeRule& rule, std::string_view tensor) const;
  /// Where layers and experts have their numbers.
  [[nodiscard]] const std::optional<Numbering>& layers() const noexcept { return layers_; }
  [[nodiscard]] const std::optional<Numbering>& experts() const noexcept { return experts_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// What comes before the rules; the first one that fits a tensor's name is used.
  [[nodiscard]] const std::vector<ViewRule>& views() const noexcept { return views_; }
  /// How the names of the ranks' tensors begin, before the views; others are left out. Empty: not at all.
  [[nodiscard]] const std::string& at() const noexcept { return at_; }
  [[nodiscard]] const std::vector<MergeRule>& rules() const noexcept { return rules_; }
  /// The JSON that it was read from, with the rules of the plan that it extends.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  /// The model's config.json with the numbers of heads that it omits; null if there is none.
  [[nodiscard]] const Config& model_config() const noexcept { return model_config_; }
  /// The model's config.json as it is.
  [[nodiscard]] const Config& given_config() const noexcept { return given_config_; }
  /// Replaces model_config().
  void set_model_config(Config config) { model_config_ = std::move(config); }

 private:
  /// Without its name and config.json. `beside`: the directory in which plans are looked for that it extends; empty:
  /// none. `depth`: how many plans extend this one.
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

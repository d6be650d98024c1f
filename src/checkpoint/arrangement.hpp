// SPDX-License-Identifier: Apache-2.0
#pragma once
// Combines the tensors of all ranks: applies a plan and a parallel layout to names and shapes. Nothing here reads or
// writes elements.
//
//  1. Numbers: pipeline stages and expert ranks that count from 0 get the numbers that their layers and experts have in
//     the model.
//  2. Rules: each name is matched with its rule; a name without a rule is an error, and dropped names are counted.
//  3. Ranks: the layout determines which ranks must have a tensor. It is an error if such a rank lacks it, or if
//     another rank has it, too (two sources of one name).
//  4. Merge: the tensors are joined along the rule's axis. Tensors of ranks that differ in other coordinates must be
//     equal. So must attention heads that several ranks have because there are fewer heads than ranks.
//  5. Names: rules may rename; two results with one name are an error.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/merge/layout.hpp"

namespace muster {

/// One tensor as listed in a file's header.
struct NamedSpec {
  std::string name;
  TensorSpec spec;
};

/// The tensors that sharding padded: (dimension, size of the whole tensor along it) by tensor name.
using PaddedSizes = std::map<std::string, std::pair<std::size_t, std::int64_t>, std::less<>>;

/// The tensors that sharding cut by whole attention heads so that some ranks share heads or have fewer than others: the
/// heads of each block, by tensor name.
using HeadCounts = std::map<std::string, std::vector<std::int64_t>, std::less<>>;

/// A scale that every rank has in full, because the cut of its weight divides blocks.
struct BlockedPart {
  std::size_t dim = 0;     ///< the dimension along which the weight is cut
  std::int64_t begin = 0;  ///< start of the rank's part in the whole weight
  std::int64_t block = 0;  ///< elements of the weight per element of the scale
  friend bool operator==(const BlockedPart&, const BlockedPart&) = default;
};
/// By tensor name.
using BlockedParts = std::map<std::string, BlockedPart, std::less<>>;

/// The tensors of one rank.
struct RankTensors {
  std::vector<NamedSpec> tensors;
  PaddedSizes padded;
  HeadCounts heads = {};
  bool is_ours = false;  ///< the shard records how it was cut, so nothing is guessed
  int number = 0;        ///< index in the rank's list of tensors
  BlockedParts blocked = {};
};

/// A tensor of the model.
struct ArrangedTensor {
  std::string name;    ///< in the result
  std::string origin;  ///< the ranks' name of it, with the model's numbers
  const MergeRule* rule = nullptr;
  merge::Layout layout;
  std::vector<SourceRef> sources;             ///< those that the layout requires
  std::vector<std::vector<SourceRef>> equal;  ///< sets of at least two sources that must be bit-identical
  std::vector<SourceRef> unused = {};         ///< of ranks that the rule "first" ignores
};

struct DroppedTensor {
  std::string origin;
  const MergeRule* rule = nullptr;
  std::vector<SourceRef> sources;
  std::string reason = {};  ///< empty: the plan gives no reason
};

struct Arrangement {
  std::vector<ArrangedTensor> tensors;  ///< sorted by name, numbers in names by their value
  std::vector<DroppedTensor> dropped;
  std::vector<std::string> notes = {};  ///< for the reader of the report
};

/// Combines the tensors of every rank of `layout`. The plan must outlive the result. Throws Error(argument |
/// rank_mismatch) that lists at most ten of the affected names.
Arrangement arrange(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks);

/// Sorts "layers.2." before "layers.10.".
bool natural_less(std::string_view a, std::string_view b);

/// Throws Error(argument) if the layout needs numbers of layers or experts, and the plan does not specify their
/// position in names.
void check_numbering(const MergePlan& plan, const ParallelLayout& layout);
/// Adds "NAME (one of N): words" to the notes unless `names` is empty.
void note_names(std::vector<std::string>& notes, const std::vector<std::string>& names, std::string_view words);
/// Adds a note about rules that match no tensor, unless the plan is built in.
void note_unused_rules(const MergePlan& plan, Arrangement& arrangement);

/// Returns the possible names of the weight of a quantisation scale; empty if the name is not that of a scale.
std::vector<std::string> weights_of_scale(std::string_view name);

/// Returns text such as `"a", "b" and 3 more`.
std::string some_names(std::vector<std::string> names);
/// Returns the error message for `names` without a rule.
std::string no_rule_words(const MergePlan& plan, const std::vector<std::string>& names);

// The inverse operation: the part of each tensor of a model that each rank of a layout gets, and its name on that rank.
// Nothing here reads or writes elements.

/// A tensor of the model under its name on the ranks, with the model's numbers.
struct WholeTensor {
  std::string origin;
  const MergeRule* rule = nullptr;
  TensorSpec spec;
};

/// Applies a plan in reverse to a model's tensors. Throws Error(argument) that lists the names without a rule.
std::vector<WholeTensor> wholes_of(const MergePlan& plan, std::span<const NamedSpec> model);

struct PlacedTensor {
  std::string name;       ///< with this rank's numbers of layers and experts
  std::size_t whole = 0;  ///< index in the model's list
  int part = 0;           ///< index of the part in that tensor's cut
};

struct Placement {
  std::vector<merge::Cut> cuts;                  ///< one per whole tensor
  std::vector<std::vector<PlacedTensor>> ranks;  ///< in the order of the model's list
  std::vector<PaddedSizes> padded;               ///< of every rank, by its own names; also scales cut to one element
  std::vector<HeadCounts> heads;                 ///< of every rank, by its own names
  std::vector<BlockedParts> blocked;             ///< of every rank, by its own names
  std::vector<std::string> notes;                ///< for the reader of the report
};

/// Distributes the model over the ranks of a layout. Layers and experts are assigned in contiguous ranges; if they do
/// not divide evenly, the first ranks get one more. No attention head and no block of a scale is divided. If the cut of
/// a weight of 8-bit floats would divide a block, ranks get the whole scale. Throws Error(argument) if a rule is not
/// invertible, a tensor cannot be cut, or ranks would be left without a layer, an expert or a head.
Placement place(const MergePlan& plan, const ParallelLayout& layout, std::span<const WholeTensor> wholes);

// Functions that plan.cpp, plan_json.cpp and plan_names.cpp share, and their queries of config.json. Everything here is
// local.

/// The built-in plans, from src/checkpoint/plans/: the same text as a plan file, by name.
struct BuiltinPlan {
  std::string_view name;
  std::string_view json;
};
std::span<const BuiltinPlan> builtin_plans();
/// Returns null if no plan has that name.
const BuiltinPlan* find_builtin_plan(std::string_view name);
/// Returns the rules that a rule of a plan's JSON stands for. For a linear layer (the actions "column" and "row") they
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

/// Returns a number of a plan. Throws Error(argument), whose message begins with `where`, if config.json lacks it or
/// its value is not a number.
std::int64_t plan_number(const MergePlan& plan, const PlanNumber& number, std::string_view where);

/// Returns the number of equal units into which the `count` heads of a tensor are cut for `parts` ranks. A rank with
/// whole groups of heads has the key-value head of each group. A rank with parts of two groups would lack one. Returns
/// nullopt if no cut keeps the heads of a group with their key-value head.
std::optional<std::int64_t> head_units(const MergePlan& plan, const PlanNumber& heads, std::int64_t count,
                                       std::int64_t parts);
/// Returns the error message for a rule whose number of heads is unknown.
std::string unknown_heads_words(const MergePlan& plan, const PlanNumber& heads, int parts);

/// Whether the rule excludes its tensors from the result.
bool is_left_out(const MergeRule& rule);

/// Expands the braces of a glob; returns at least one glob. Throws Error(argument) as TensorPattern::glob does.
std::vector<std::string> expand_braces(const std::string& glob);

/// The new names of a rule: text in which `$1` stands for the match of the pattern's first star (group), and `$$` for a
/// dollar.
class NewName {
 public:
  /// Throws Error(argument) on a `$` without a number, and on a number without a corresponding star.
  NewName(std::string_view text, const TensorPattern& pattern);
  /// `captures` are the pattern's matches in the old name.
  [[nodiscard]] std::string apply(const std::vector<std::string_view>& captures) const;
  /// Whether the rule may produce this name. Then old_name() returns the only possible origin, which is correct if the
  /// plan applies this rule to it.
  [[nodiscard]] bool fits(std::string_view new_name) const;
  /// Returns the old name. Throws Error(argument) with the reason alone if the renaming is not invertible.
  [[nodiscard]] std::string old_name(std::string_view new_name) const;
  /// Returns the text as written in the plan.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  /// Literal text, or the capture with that index (from 0 on).
  struct Part {
    std::string text = {};
    std::size_t group = 0;
    bool is_group = false;
  };
  std::string text_;
  std::vector<Part> parts_;
  std::string pattern_;                    // without braces
  std::shared_ptr<const re2::RE2> regex_;  // matches the new names; has one group for each part that is a capture
  std::string_view no_way_back_;           // the reason why the renaming is not invertible; empty if it is
};

// The sizes of tensors in a model's config.json. A missing value is never an error.

/// Returns a value by its path: keys and indices of items with dots between them ("layers.0.hidden_size"). A key may
/// contain dots, and takes precedence over a path with the same text. Returns null if the value is missing.
const Config* find_place(const Config& tree, std::string_view place);
/// Returns a value by its name or path, from the model or else from its text model ("text_config", "llm_config",
/// "language_config"). Returns null if it is missing.
const Config* find_here_or_in_text(const Config& config, std::string_view name);
/// Searches as find_here_or_in_text, and then under the alternative names that some models use for a value.
const Config* find_in_config(const Config& config, std::string_view path);

/// Returns the config with the numbers of heads that it omits. They are derived from the shapes of a model's tensors if
/// these determine them, otherwise from the defaults of the architecture. The length of a per-head norm is the size of
/// a head. `ranks` is the number of tensor-parallel ranks that share the matrices of `tensors`, which may be empty.
Config with_sizes(const Config& config, std::span<const NamedSpec> tensors, std::int64_t ranks);
/// Sets a plan's config to with_sizes() of its config and `tensors`.
void fit_to(MergePlan& plan, std::span<const NamedSpec> tensors, std::int64_t ranks = 1);

/// Returns a number of at least 1; nullopt if there is no such value.
std::optional<std::int64_t> model_number(const Config& config, std::string_view path);

/// Returns the size of one attention head: "head_dim", or else the hidden size divided by the number of heads.
std::optional<std::int64_t> head_size(const Config& config);

/// Checks a model's tensors, under the names of Hugging Face's models, against the plan's config.json: heads, hidden
/// size, vocabulary, layers, intermediate size. Throws Error(argument) that names the tensor, the fields and the
/// numbers. More rows of a vocabulary than in config.json are padding, and no error.
void check_against_config(const MergePlan& plan, std::span<const NamedSpec> model);

}  // namespace muster

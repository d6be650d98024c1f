// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tensors of all ranks are together: a plan and a parallel layout applied to names and shapes. Nothing here
// touches elements.
//
//  1. Numbers: stages and expert ranks that count from 0 get the numbers that their layers and experts have in the
//     model.
//  2. Rules: each name finds its rule; names without one are an error, dropped ones are counted.
//  3. Ranks: which ranks have to have a tensor follows from the layout; one that lacks it is an error, and so is one
//     that has what belongs to another (two sources of one name).
//  4. Merge: the tensors along the rule's axis are joined; those of ranks that differ in other coordinates must be
//     equal, and so must attention heads that several ranks have, because there are fewer of them than ranks.
//  5. Names: rules may rename; two results of one name are an error.

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

/// One tensor, as a file lists it.
struct NamedSpec {
  std::string name;
  TensorSpec spec;
};

/// What sharding padded: (dimension, size of the whole along it) by tensor name.
using PaddedSizes = std::map<std::string, std::pair<std::size_t, std::int64_t>, std::less<>>;

/// What sharding cut by whole attention heads so that ranks have some alike or fewer than others: the heads of each
/// block, by tensor name.
using HeadCounts = std::map<std::string, std::vector<std::int64_t>, std::less<>>;

/// A scale that ranks have all of, because the cut of its weight goes through blocks.
struct BlockedPart {
  std::size_t dim = 0;     ///< that the weight is cut along
  std::int64_t begin = 0;  ///< where the rank's part begins in the whole weight
  std::int64_t block = 0;  ///< elements of the weight that one of the scale's is for
  friend bool operator==(const BlockedPart&, const BlockedPart&) = default;
};
/// By tensor name.
using BlockedParts = std::map<std::string, BlockedPart, std::less<>>;

/// One rank's tensors.
struct RankTensors {
  std::vector<NamedSpec> tensors;
  PaddedSizes padded;
  HeadCounts heads = {};
  bool is_ours = false;  ///< the shard says how it was cut: nothing is left to guess
  int number = 0;        ///< of the rank
  BlockedParts blocked = {};
};

/// A tensor of the model.
struct ArrangedTensor {
  std::string name;    ///< in the result
  std::string origin;  ///< the ranks' name of it, with the model's numbers
  const MergeRule* rule = nullptr;
  merge::Layout layout;
  std::vector<SourceRef> sources;             ///< those that the layout speaks of
  std::vector<std::vector<SourceRef>> equal;  ///< sets of at least two, each bit for bit equal
  std::vector<SourceRef> unused = {};         ///< of ranks that the rule "first" does not look at
};

struct DroppedTensor {
  std::string origin;
  const MergeRule* rule = nullptr;
  std::vector<SourceRef> sources;
  std::string reason = {};  ///< empty: the plan does not say
};

struct Arrangement {
  std::vector<ArrangedTensor> tensors;  ///< by name, numbers by their value
  std::vector<DroppedTensor> dropped;
  std::vector<std::string> notes = {};  ///< what whoever reads the report should know
};

/// `ranks`: of every rank of `layout`. The plan must outlive the result. Throws Error(argument | rank_mismatch) with
/// the names it is about, at most ten of them.
Arrangement arrange(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks);

/// "layers.2." before "layers.10.".
bool natural_less(std::string_view a, std::string_view b);

/// Throws Error(argument) if the plan does not say where the numbers stand that the layout needs.
void check_numbering(const MergePlan& plan, const ParallelLayout& layout);
/// Adds "NAME (one of N): words" to the notes, if there are names.
void note_names(std::vector<std::string>& notes, const std::vector<std::string>& names, std::string_view words);
/// Says in the notes which rules of a plan that is not built in are no tensor's.
void note_unused_rules(const MergePlan& plan, Arrangement& arrangement);

/// The names that the weight of a quantisation scale may have, by the scale's own name; none if it is no scale.
std::vector<std::string> weights_of_scale(std::string_view name);

/// "a", "b" and 3 more.
std::string some_names(std::vector<std::string> names);
/// What is wrong if `names` have no rule.
std::string no_rule_words(const MergePlan& plan, const std::vector<std::string>& names);

// The way back: which part of each tensor of a model each rank of a layout gets, and under which
// name. Nothing here touches elements.

/// A tensor of the model under the name that ranks have for it, with the model's numbers.
struct WholeTensor {
  std::string origin;
  const MergeRule* rule = nullptr;
  TensorSpec spec;
};

/// A model's tensors, read backwards through a plan. Throws Error(argument) that lists the names without a rule.
std::vector<WholeTensor> wholes_of(const MergePlan& plan, std::span<const NamedSpec> model);

struct PlacedTensor {
  std::string name;       ///< as this rank counts layers and experts
  std::size_t whole = 0;  ///< its place in the model's list
  int part = 0;           ///< of that tensor's cut
};

struct Placement {
  std::vector<merge::Cut> cuts;                  ///< of every whole tensor
  std::vector<std::vector<PlacedTensor>> ranks;  ///< in the order of the model's list
  std::vector<PaddedSizes> padded;               ///< of every rank, by its own names; also scales cut to one element
  std::vector<HeadCounts> heads;                 ///< likewise
  std::vector<BlockedParts> blocked;             ///< likewise
  std::vector<std::string> notes;                ///< what whoever reads the report should know
};

/// Layers and experts are shared out in contiguous runs, the first ranks having one more if they do not divide.
/// No attention head is cut through, and no block of a scale: where the cut of a weight of 8-bit floats would, ranks
/// have all of its scale. Throws Error(argument) if a rule has no way back, a tensor cannot be cut, or ranks would be
/// left without a layer, an expert or a head.
Placement place(const MergePlan& plan, const ParallelLayout& layout, std::span<const WholeTensor> wholes);

// What plan.cpp, plan_json.cpp and plan_names.cpp share, and what they ask config.json for. Everything here is local.

/// The plans that the library brings along, from src/checkpoint/plans/: the same text as a file's, by name.
struct BuiltinPlan {
  std::string_view name;
  std::string_view json;
};
std::span<const BuiltinPlan> builtin_plans();
/// Null if there is none of that name.
const BuiltinPlan* find_builtin_plan(std::string_view name);
/// The rules that a rule of a plan's JSON stands for: of a linear layer (the actions "column" and "row") those of its
/// tensors, else itself. Throws Error(corrupt).
std::vector<Config> single_rules(const Config& rule);
/// Whether a built-in plan has a rule with the same pattern. They are for many models: nobody misses a tensor for one.
bool is_builtin_rule(const MergeRule& rule);
/// JSON text, {PLAN: {MODEL_TYPE: ARCHITECTURE, ...}, ...}: the models that each of them is for.
std::string_view builtin_models();
/// builtin_defaults() as a tree.
const Config& default_sizes();
/// JSON text, {MODEL_TYPE: {KEY: NUMBER, ...} | MODEL_TYPE of its text model, ...}: what config.json may omit.
std::string_view builtin_defaults();

/// Bytes of a plan's text.
inline constexpr std::uint64_t longest_plan = 4 << 20;

/// Sums of a few of them fit 63 bits.
inline constexpr std::int64_t largest_plan_number = std::int64_t{1} << 53;

/// A number of a plan. Throws Error(argument), which begins with `where`, if config.json lacks it or has no number
/// there.
std::int64_t plan_number(const MergePlan& plan, const PlanNumber& number, std::string_view where);

/// How many units of equal size the `count` heads of a tensor are cut into for `parts` ranks: a rank that has whole
/// groups of heads has the key-value head of each, which a rank with parts of two groups would lack. None if no cut
/// keeps the heads of a group beside their key-value head.
std::optional<std::int64_t> head_units(const MergePlan& plan, const PlanNumber& heads, std::int64_t count,
                                       std::int64_t parts);
/// The message for a rule whose number of heads is not known.
std::string unknown_heads_words(const MergePlan& plan, const PlanNumber& heads, int parts);

/// Whether nothing of the result comes of its tensors.
bool is_left_out(const MergeRule& rule);

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
  /// As it was written.
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
  std::shared_ptr<const re2::RE2> regex_;  // fits the new names; a group for each part that is one
  std::string_view no_way_back_;           // why; empty: there is one
};

// What a model's config.json says of the sizes of its tensors. What it does not say is never an error.

/// A value by its place: keys and numbers of items with dots between them ("layers.0.hidden_size"). A key may have dots
/// of its own, and counts before the path that it looks like. Null if there is none.
const Config* find_place(const Config& tree, std::string_view place);
/// A value by its name or its place, of the model or else of its text model ("text_config", "llm_config",
/// "language_config"). Null if it is missing.
const Config* find_here_or_in_text(const Config& config, std::string_view name);
/// Finds as find_here_or_in_text, then under the other names that some models have for a value.
const Config* find_in_config(const Config& config, std::string_view path);

/// Returns the config with the numbers of heads that it omits: those that the shapes of a model's tensors prove, else
/// the defaults of the architecture. A per-head norm's length is the size of a head. `ranks`: how many tensor-parallel
/// ranks share the matrices of `tensors`, which may be empty.
Config with_sizes(const Config& config, std::span<const NamedSpec> tensors, std::int64_t ranks);
/// Gives a plan the config with the sizes of `tensors`.
void fit_to(MergePlan& plan, std::span<const NamedSpec> tensors, std::int64_t ranks = 1);

/// A number from 1 on; none if there is no such value.
std::optional<std::int64_t> model_number(const Config& config, std::string_view path);

/// Elements of one attention head: "head_dim", else hidden size by heads.
std::optional<std::int64_t> head_size(const Config& config);

/// Holds a model's tensors, with the names of HuggingFace's models, against the plan's config.json: heads, hidden size,
/// vocabulary, layers, intermediate size. Throws Error(argument) that names the tensor, the fields and the numbers.
/// More rows of a vocabulary than config.json says are padding, and no error.
void check_against_config(const MergePlan& plan, std::span<const NamedSpec> model);

}  // namespace muster

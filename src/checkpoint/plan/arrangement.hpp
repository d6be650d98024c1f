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
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/merge/layout.hpp"

namespace muster {

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

/// The place of a rank's tensor in a whole one.
struct PartPlace {
  Shape whole;
  Shape offset;
};

/// The tensors of one rank.
struct RankTensors {
  std::vector<NamedSpec> tensors;
  PaddedSizes padded;
  HeadCounts heads = {};
  bool is_ours = false;  ///< the shard records how it was cut, so nothing is guessed
  int number = 0;        ///< index in the rank's list of tensors
  BlockedParts blocked = {};
  std::vector<PartPlace> places = {};  ///< one per tensor, if they are boxes (box_arrangement.hpp)
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

/// The extent of the tensors that are arranged together.
enum class Extent : std::uint8_t {
  model,  ///< all tensors of the model
  unit,   ///< some of them: layers may be missing, and their numbers in the names must be those of the model
};

/// Combines the tensors of every rank of `layout`. The plan must outlive the result. Throws Error(invalid_argument |
/// rank_mismatch) that lists at most ten of the affected names.
Arrangement arrange(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks,
                    Extent extent = Extent::model);

/// Sorts "layers.2." before "layers.10.".
bool natural_less(std::string_view a, std::string_view b);

/// Throws Error(invalid_argument) if the layout needs numbers of layers or experts, and the plan does not specify their
/// position in names.
void check_numbering(const MergePlan& plan, const ParallelLayout& layout);
/// Adds "NAME (one of N): message" to the notes unless `names` is empty.
void note_names(std::vector<std::string>& notes, const std::vector<std::string>& names, std::string_view words);
/// Adds a note about rules whose numbers are not among `used`, unless the plan is built in.
void note_unused_rules(const MergePlan& plan, const std::set<std::size_t>& used, std::vector<std::string>& notes);
/// Returns the numbers of the rules that match a tensor.
std::set<std::size_t> rules_used(const Arrangement& arrangement);

/// Returns the possible names of the weight of a quantisation scale; empty if the name is not that of a scale.
std::vector<std::string> weights_of_scale(std::string_view name);

/// Returns text such as `"a", "b" and 3 more`.
std::string some_names(std::vector<std::string> names);
/// Returns the error message for `names` without a rule.
std::string no_rule_words(const MergePlan& plan, const std::vector<std::string>& names);

}  // namespace muster

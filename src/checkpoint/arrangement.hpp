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
#include <utility>
#include <vector>

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

/// One rank's tensors.
struct RankTensors {
  std::vector<NamedSpec> tensors;
  PaddedSizes padded;
  HeadCounts heads = {};
  bool is_ours = false;  ///< the shard says how it was cut: nothing is left to guess
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

/// Says in the notes which rules of a plan that is not built in are no tensor's.
void note_unused_rules(const MergePlan& plan, Arrangement& arrangement);

/// The name of the weight that a quantisation scale has by its own name; none if it has none.
std::optional<std::string> weight_of_scale(std::string_view name);

/// "a", "b" and 3 more.
std::string some_names(std::vector<std::string> names);
/// What is wrong where `names` have no rule.
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
  std::vector<std::string> notes;                ///< what whoever reads the report should know
};

/// Layers and experts are shared out in contiguous runs, the first ranks having one more where they do not divide.
/// No attention head and no block of a scale is cut through. Throws Error(argument) if a rule has no way back, a tensor
/// cannot be cut, or ranks would be left without a layer, an expert or a head.
Placement place(const MergePlan& plan, const ParallelLayout& layout, std::span<const WholeTensor> wholes);

}  // namespace muster

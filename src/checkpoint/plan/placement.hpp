// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inverse operation: the part of each tensor of a model that each rank of a layout gets, and its name on that rank.
// Nothing here reads or writes elements.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/merge/layout.hpp"

namespace muster {

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

}  // namespace muster

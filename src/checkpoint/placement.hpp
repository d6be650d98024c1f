// SPDX-License-Identifier: Apache-2.0
#pragma once
// The way back of arrangement.hpp: which part of each tensor of a model each rank of a layout gets, and under which
// name. Nothing here touches elements.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "src/checkpoint/arrangement.hpp"

namespace muster {

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

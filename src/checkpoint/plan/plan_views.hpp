// SPDX-License-Identifier: Apache-2.0
#pragma once
// Applies a plan's views to the tensors of ranks, in both directions. Forwards, views run before the rules and turn the
// ranks' tensors into the inputs of the rules. In reverse, they run after the cut. Nothing here reads or writes
// elements.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/viewed_tensors.hpp"

namespace muster {

/// Whether the tensors of ranks differ from the inputs of the rules.
inline bool has_views(const MergePlan& plan) {
  return !plan.views().empty() || !plan.at().empty();
}

/// A tensor of a rank that a view, or the plan's "at", leaves out.
struct LeftOut {
  std::size_t index = 0;  ///< index in the rank's list
  std::size_t view = 0;   ///< from 1 on; 0: "at"
  std::string reason;
};

struct ViewedRank {
  RankTensors tensors;
  /// one per tensor; boxes refer to indices in the rank's list; empty: the tensors are the rank's own
  std::vector<ViewedTensor> views;
  std::vector<LeftOut> left_out = {};
};

/// Throws Error(argument) that names view and tensor if a shape does not fit, a number of config.json is missing, or
/// two tensors get one name.
ViewedRank view_rank(const MergePlan& plan, const ParallelLayout& layout, RankTensors rank);

/// Converts floating point numbers to `to` when they are read; integers are unchanged. Throws Error(argument) if the
/// tensor has 8 or 4 bits per element.
void cast_view(ViewedTensor& tensor, DType to);
/// Returns the view of a whole tensor, which has this index in the rank's list.
ViewedTensor as_it_lies(const NamedSpec& tensor, std::size_t place);

/// The inverse: returns the tensors of a rank as views of `tensors`, the outputs of the reversed rules; boxes refer to
/// indices in `tensors`. Throws Error(argument) if a view is not invertible, or a part of a tensor is missing.
std::vector<ViewedTensor> unview_rank(const MergePlan& plan, const ParallelLayout& layout,
                                      std::span<const NamedSpec> tensors);

/// Returns the views of each process, if process p has the ranks p, p + processes, ... `counts` has the number of each
/// rank's own tensors.
std::vector<std::vector<ViewedTensor>> views_by_process(std::span<const std::vector<ViewedTensor>> views,
                                                        std::span<const std::size_t> counts, int processes);

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// A plan's views applied to what ranks have, both ways. Forwards they come before the rules: what ranks have becomes
// what rules are for. Backwards they come after the cut. Nothing here touches elements.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/checkpoint/viewed_tensors.hpp"

namespace muster {

/// Whether ranks have other tensors than those that rules are for.
inline bool has_views(const MergePlan& plan) {
  return !plan.views().empty() || !plan.at().empty();
}

/// A tensor of a rank that a view, or the plan's "at", leaves out.
struct LeftOut {
  std::size_t index = 0;  ///< in the rank's list
  std::size_t view = 0;   ///< from 1 on; 0: "at"
  std::string reason;
};

struct ViewedRank {
  RankTensors tensors;
  std::vector<ViewedTensor> views;  ///< of each; boxes of places in the rank's list; empty: they are the rank's own
  std::vector<LeftOut> left_out = {};
};

/// Throws Error(argument) that names view and tensor if a shape does not fit, a number of config.json is missing, or
/// two tensors get one name.
ViewedRank view_rank(const MergePlan& plan, const ParallelLayout& layout, RankTensors rank);

/// Floating point numbers become `to` when they are read; integers stay. Throws Error(argument) if the tensor is of 8
/// or 4 bits.
void cast_view(ViewedTensor& tensor, DType to);
/// The view of a whole tensor, which is at this place of the rank's list.
ViewedTensor as_it_lies(const NamedSpec& tensor, std::size_t place);

/// The way back: the tensors of a rank as views make them of `tensors`, those that rules are for; boxes of places among
/// these. Throws Error(argument) if a view has no way back, or a part of a tensor is not there.
std::vector<ViewedTensor> unview_rank(const MergePlan& plan, const ParallelLayout& layout,
                                      std::span<const NamedSpec> tensors);

/// What each process views, if process p has the ranks p, p + processes, ...; `counts`: of each rank's own tensors.
std::vector<std::vector<ViewedTensor>> views_by_process(std::span<const std::vector<ViewedTensor>> views,
                                                        std::span<const std::size_t> counts, int processes);

}  // namespace muster

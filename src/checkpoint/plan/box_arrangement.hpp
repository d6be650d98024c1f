// SPDX-License-Identifier: Apache-2.0
#pragma once
// Combines tensors of ranks that are boxes of the model's tensors. It takes the place of arrange() if there is no plan.
//
//  1. Parts of one name must have the same dtype and the same whole shape.
//  2. Of equal boxes, one is used. Boxes that overlap are cut. All common elements must be equal.
//  3. Together the boxes must contain every element.

#include <span>
#include <string_view>

#include "src/checkpoint/plan/arrangement.hpp"

namespace muster {

/// The name of the plan in the report of an export by boxes.
inline constexpr std::string_view by_boxes_name = "boxes";
/// Returns a plan that leaves all names as they are, for the config of the model.
MergePlan plan_of_boxes(const Config* model_config);

struct BoxOptions {
  bool is_balanced = false;    ///< uses the replica of the rank with the least bytes, else that of the first rank
  bool check_replicas = true;  ///< compares common elements
};

/// `plan` is plan_of_boxes() and must outlive the result. Throws Error(rank_mismatch | invalid_argument | unsupported)
/// that names the tensor and the ranks.
Arrangement arrange_boxes(const MergePlan& plan, std::span<const RankTensors> ranks, const BoxOptions& options);

}  // namespace muster

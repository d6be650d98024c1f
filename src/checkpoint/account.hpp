// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every tensor of every rank, and what becomes of it.

#include <span>

#include "muster/export.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/export_outputs.hpp"

namespace muster {

/// `ranks`: what was arranged. Throws Error(corrupt) where a tensor of a rank is in the result twice or not at all,
/// which would be a bug of ours: better no checkpoint than one that lacks something.
ExportAccount account_for(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks,
                          const Arrangement& arrangement, const ExportOutputs& outputs,
                          const std::optional<ParallelLayout>& to);

}  // namespace muster

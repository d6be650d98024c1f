// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the first process works out before a byte moves, from what all shards say of themselves.

#include <cstdint>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/assembly_plan.hpp"
#include "src/checkpoint/export_outputs.hpp"
#include "src/checkpoint/shard_set.hpp"

namespace muster {

struct ExportJob {
  MergePlan plan;  ///< the arrangement's rules are its
  std::vector<RankTensors> ranks;
  ExportOutputs outputs;
  ExportAccount account;
  std::string fingerprint;  ///< the same for the same shards, results and files
};

/// `listings`: of all shards, in any order. Throws as export_model.
ExportJob plan_job(const std::string& shards_dir, const std::string& plan, std::vector<ShardListing> listings,
                   const Metadata& metadata, const ExportOptions& options);

/// Windows, and how many of them each writer has, so that all of them and what each process holds beside are within the
/// budget; `spread`: over several hosts, which send each other parts of windows. Throws Error(argument) where it is too
/// small for anything.
struct WindowShape {
  std::uint64_t bytes = 0;
  std::uint32_t depth = 2;
};
WindowShape shape_windows(std::uint64_t budget, int processes, Writers writers, bool spread);

}  // namespace muster

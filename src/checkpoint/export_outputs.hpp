// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files that an arrangement becomes: one checkpoint, or the shards of another layout.

#include <cstdint>
#include <string>
#include <vector>

#include "muster/model_dir.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/assembly_plan.hpp"
#include "src/checkpoint/shard_files.hpp"

namespace muster {

struct ExportOutputs {
  std::vector<OutputFile> files;
  std::vector<std::vector<SourceRef>> equal;  ///< sets of sources that must be bit for bit equal
  std::vector<std::string> equal_names;       ///< the tensors that they are of
  std::string index;                          ///< of a checkpoint of several files; else empty
  std::vector<std::string> notes;             ///< of shards: Placement's
};

/// HuggingFace's layout. Throws as plan_shards.
ExportOutputs checkpoint_outputs(const Arrangement& arrangement, std::uint64_t max_shard_size,
                                 const Metadata& metadata);

/// A shard a rank of `layout`. Throws as place().
ExportOutputs shard_outputs(const Arrangement& arrangement, const MergePlan& plan, const ParallelLayout& layout,
                            const Metadata& metadata);

/// A whole model as an arrangement: every tensor from the one rank that there is, under the name that the plan has for
/// it backwards. Throws Error(argument) that lists the names without a rule.
Arrangement arrange_model(const MergePlan& plan, std::span<const NamedSpec> model);

}  // namespace muster

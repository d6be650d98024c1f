// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model's shards as the states of a job in a workspace.
//
//  1. Files that are no weights are compared with those of the same names in the workspace.
//  2. Each rank's state is written under a growing name, all ranks one after the other, and takes its name when it is
//     whole. The job's number is new, so that nobody reads it before all are there: until then no generation is common.
//  3. The other files are copied. What fails before removes the states that have their names.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "src/checkpoint/assembly.hpp"

namespace muster {

struct WorkspaceShards {
  std::string job;          ///< 32 digits
  std::uint64_t bytes = 0;  ///< of all states' tensors
  std::vector<LeftFile> left = {};
};

/// `ranks`: of each rank, from tensors of one process, `sources`. Throws as prepare_workspace and StateFileWriter;
/// Error(argument) where a file that is no weight is there and other, unless forced.
WorkspaceShards write_shards_to_workspace(std::span<const OutputFile> ranks, std::span<const AssemblySource> sources,
                                          const std::string& model_dir, const std::string& workspace,
                                          const ShardOptions& options);

}  // namespace muster

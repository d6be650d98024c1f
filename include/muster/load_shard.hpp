// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of a checkpoint, without shards on the disk.

#include <stop_token>
#include <string>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"
#include "muster/state.hpp"

namespace muster {

struct LoadShardOptions {
  ProgressCallback progress = {};
  /// As ShardOptions::at.
  std::string at = {};
  /// A stop request ends it: Error(cancelled).
  std::stop_token stop = {};
};

/// The tensors that `rank`'s shard would have if shard_model cut `model_dir` for `layout`, under the same names and in
/// the same order: bytes are read from the model's files alone, as far as the rank needs them. Local; several threads.
/// Memory is that of the tensors and some MiB. Ranks of one host that load at once read through the page cache.
///
/// Throws as shard_model, and Error(argument) if the layout has no such rank.
std::vector<NamedTensor> load_shard(const std::string& model_dir, const std::string& plan, const ParallelLayout& layout,
                                    int rank, const LoadShardOptions& options = {});

}  // namespace muster

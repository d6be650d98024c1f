// SPDX-License-Identifier: Apache-2.0
#pragma once
// Loads the part of a checkpoint that one rank needs, without writing shards to disk.

#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "muster/group.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"
#include "muster/state.hpp"

namespace muster {

/// Options of load_shard().
struct LoadShardOptions {
  ProgressCallback progress = {};  ///< reports the bytes of the tensors of this rank
  /// As ExportOptions::key.
  std::string key = {};
  /// For one file per rank: file names as ExportOptions::file_pattern, and the layout of the ranks.
  std::string file_pattern = {};
  /// See the member above.
  std::optional<ParallelLayout> source_layout = {};
  /// As ShardOptions::base_model and ShardOptions::to_plan. For rank shards without a `to_plan`, `plan` also splits, or
  /// "auto" if `plan` has views.
  std::string base_model = {};
  /// See `base_model`.
  std::string to_plan = {};
  /// A stop request ends the call with Error(cancelled). The collective overload also aborts the group.
  std::stop_token stop = {};
};

/// Returns the tensors that shard_model() would write for `rank` if it split `model_dir` for `target_layout`, with the
/// same names and in the same order. Local; uses several threads. Memory is that of the tensors plus a few MiB.
///
/// If `model_dir` holds rank shards (a directory of shards, a workspace, or a third-party checkpoint of ranks), the
/// call splits the model that export_model() would make of them. The same applies to any source with a `to_plan`.
/// `plan` may be empty for shards that record their plan. Only the bytes that the rank needs are read, directly from
/// the existing files.
///
/// Throws as shard_model() or export_model(), and Error(invalid_argument) if the layout has no such rank.
std::vector<NamedTensor> load_shard(const std::string& model_dir, const ParallelLayout& target_layout, int rank,
                                    const std::string& plan, const LoadShardOptions& options = {});

/// Loads the parts of a model on all ranks of `group`. Collective. Each rank passes the `rank` whose tensors it
/// receives; several ranks may pass the same one. Each host reads the model once: ranks take turns in reading data that
/// several of them need, into 8 MiB of shared memory each.
///
/// If one rank fails, all ranks throw its error, with its message and rank. Throws Error(rank_mismatch) also if ranks
/// see different models, or pass different plans or layouts. The group remains usable after these errors. Error(timeout
/// | peer_lost | cancelled) aborts it.
std::vector<NamedTensor> load_shard(const std::string& model_dir, const ParallelLayout& target_layout, int rank,
                                    const std::string& plan, Group& group, const LoadShardOptions& options = {});

}  // namespace muster

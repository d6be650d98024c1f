// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of a checkpoint, without shards on the disk.

#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"
#include "muster/state.hpp"
#include "muster/sync_group.hpp"

namespace muster {

struct LoadShardOptions {
  ProgressCallback progress = {};  ///< of this rank's tensors
  /// As ShardOptions::at.
  std::string at = {};
  /// Of files of ranks, as in ExportOptions: their names, and the layout that they are of.
  std::string shards = {};
  std::optional<ParallelLayout> from = {};
  /// As ShardOptions::base and ShardOptions::to_plan. Of files of ranks, without a `to_plan`: `plan` cuts, too, or
  /// "auto" if that has views.
  std::string base = {};
  std::string to_plan = {};
  /// A stop request ends it: Error(cancelled), and the group with it.
  std::stop_token stop = {};
};

/// The tensors that `rank`'s shard would have if shard_model cut `model_dir` for `layout`, under the same names and in
/// the same order. Of the shards of ranks (a directory of shards, a workspace, a foreign checkpoint of ranks; `plan`
/// may be empty for shards that know theirs) it is the model that export_model would make of them that is cut; so it is
/// of anything with `to_plan`. Bytes are read from the files that are there alone, as far as the rank needs them.
/// Local; several threads. Memory is that of the tensors and some MiB.
///
/// Throws as shard_model or export_model, and Error(argument) if the layout has no such rank.
std::vector<NamedTensor> load_shard(const std::string& model_dir, const std::string& plan, const ParallelLayout& layout,
                                    int rank, const LoadShardOptions& options = {});

/// Likewise by all ranks of `group`, each of which names the part that it wants; several may want the same one. Each
/// host reads the model once: ranks read in turns what several of them need, into 8 MiB of shared memory each.
///
/// Collective. One rank's failure is thrown on all, with its words and its rank: Error(rank_mismatch) also if ranks
/// see other models, or give other plans or layouts. The group is usable after that; Error(timeout | peer_lost |
/// cancelled) as gather.hpp has them.
std::vector<NamedTensor> load_shard(const std::string& model_dir, const std::string& plan, const ParallelLayout& layout,
                                    int rank, SyncGroup& group, const LoadShardOptions& options = {});

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Cutting a checkpoint into one file a rank, and gathering such shards into a checkpoint again: what `muster shard` and
// `muster export` do, as library calls. Both give the same names, dtypes, shapes and tensor bytes back.

#include <cstdint>
#include <string>

#include "muster/plan.hpp"
#include "muster/sync_group.hpp"

namespace muster {

struct ShardOptions {
  bool force = false;  ///< replace `out` where it is a directory with a model or shards
};

struct ShardReport {
  std::uint64_t tensors = 0;        ///< of the model
  std::uint64_t bytes = 0;          ///< of its tensors
  std::uint64_t bytes_written = 0;  ///< of the shards' tensors: repeated and padded ones counted
  double seconds = 0;
};

/// Cuts the model in `model_dir` (HuggingFace's layout) by the plan, backwards, into rank-00000-of-0000N.safetensors
/// ... and copies all files that are no weights. `out` appears whole or not at all; nothing is left behind on failure.
/// A dimension that `ranks` does not divide is padded with zeros; its true size stands in each shard's metadata
/// (docs/plans.md). Local. Holds some MiB, whatever the model's size.
///
/// Throws Error(argument) on names without a rule, rules without a way back, an `out` that exists, ranks outside 1 to
/// 4096; Error(not_found | corrupt | io | no_space) from reading and writing.
ShardReport shard_model(const std::string& model_dir, const std::string& out, const MergePlan& plan, int ranks,
                        const ShardOptions& options = {});

/// The N of a directory with rank-00000-of-0000N.safetensors. Throws Error(not_found) where there is none or where one
/// is missing (it is named), Error(argument) where the files are of sets of different sizes. Local.
int count_shards(const std::string& shards_dir);

struct ExportOptions {
  bool force = false;                            ///< as for sharding
  std::uint64_t max_shard_size = 5'000'000'000;  ///< bytes of tensors in one file of the checkpoint
  std::uint64_t batch_bytes = 256 << 20;  ///< of one rank that travel in one exchange; a larger tensor goes alone
};

struct ExportReport {
  std::uint64_t tensors_in = 0;  ///< of all ranks; this and all below are filled on rank 0 alone
  std::uint64_t bytes_in = 0;
  std::uint64_t tensors_out = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t files = 0;
  std::uint64_t exchanges = 0;  ///< of tensors
  double gather_seconds = 0;    ///< in these exchanges
  double seconds = 0;           ///< of everything
  std::string explain;          ///< how the last exchange travelled
};

/// Rank r maps shard r of group.size(), rank 0 gathers, merges by the plan and writes HuggingFace's layout with the
/// files that are no weights. `plan` is a built-in plan's name or a file, read on rank 0. All four parameters count on
/// rank 0
/// (`shards_dir` on every rank). `out` appears whole or not at all; nothing is left behind on failure. Rank 0 holds
/// some batches of all ranks, not the model.
///
/// Collective. One rank's failure is thrown on all, with its words and its rank: Error(argument | rank_mismatch |
/// corrupt | not_found | io | no_space), after which the group is usable; Error(timeout | peer_lost) as gather.hpp has
/// them.
ExportReport export_model(const std::string& shards_dir, const std::string& out, const std::string& plan,
                          SyncGroup& group, const ExportOptions& options = {});

}  // namespace muster

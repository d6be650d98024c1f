// SPDX-License-Identifier: Apache-2.0
#pragma once
// Cutting a checkpoint into one file a rank, and gathering such shards into a checkpoint again: what `muster shard` and
// `muster export` do, as library calls. Both give the same names, dtypes, shapes and tensor bytes back.

#include <chrono>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "muster/progress.hpp"
#include "muster/sync_group.hpp"

namespace muster {

/// Who writes the files of an export.
enum class Writers : std::uint8_t {
  first,   ///< rank 0 alone: where the others do not see the output's file system
  owners,  ///< every rank writes what it has; parts that several ranks have are shared out by size
};
std::string_view to_string(Writers writers) noexcept;

struct ShardOptions {
  /// Replace `out` if it is a checkpoint or a directory of shards, with no other files in it.
  bool force = false;
  /// `out` is a workspace, made if it is not there: each rank's shard is its state of generation 1 of a new job.
  bool to_workspace = false;
  std::optional<int> zstd_level = {};            ///< of states; none: not compressed
  std::string carry = {};                        ///< which files that are no weights go along (model_dir.hpp)
  std::optional<ParallelLayout> from = {};       ///< of shards that `to_plan` cuts anew: as an export's `layout`
  std::string at = {};                           ///< of a foreign checkpoint, as for an export
  std::string shards = {};                       ///< of files of ranks, likewise
  std::string job = {};                          ///< of a workspace, likewise
  std::optional<std::uint64_t> generation = {};  ///< likewise
  /// A model's directory, as for an export: files that are no weights come from there, and the plans' config.json.
  std::string base = {};
  /// By this plan the model is cut, and by `plan` it is read first, as export_model does: a checkpoint whose tensors
  /// have other names or shapes than HuggingFace's, or the shards of ranks. Empty: it has HuggingFace's, and `plan`
  /// cuts it.
  std::string to_plan = {};
  /// Unfinished outputs for the same `out` that processes of other hosts left, and that have not changed for so long,
  /// are removed, or gone on with (`resume`); none: only what is proved to be nobody's, because its process was on this
  /// host.
  std::optional<std::chrono::seconds> abandoned_after = {};
  bool dry_run = false;  ///< nothing is written: the report is what it would be; `out` is not looked at
  ProgressCallback progress = {};
  /// A stop request ends it: Error(cancelled), and nothing is left behind.
  std::stop_token stop = {};
};

struct ShardReport {
  std::uint64_t tensors = 0;        ///< of the model
  std::uint64_t bytes = 0;          ///< of its tensors
  std::uint64_t bytes_written = 0;  ///< of the shards' tensors: repeated and padded ones counted
  std::string job = {};             ///< of a workspace: the new job's nonce, 32 digits
  Omissions left = {};              ///< files that did not go along
  /// What whoever uses the shards should know: heads on several ranks, unused rules.
  std::vector<std::string> notes = {};
  double seconds = 0;
};

/// Cuts the model in `model_dir` (HuggingFace's layout, or a foreign checkpoint that is whole) by the plan, backwards,
/// into rank-00000-of-0000N.safetensors
/// ... and copies the files beside the weights (`carry`). `plan` is a built-in plan's name, "auto" or a file. `out`
/// appears whole or not at all; nothing is left behind on failure. A dimension that the ranks do not divide is padded
/// with zeros; its true size stands in each shard's metadata, as do the plan and checksums (docs/plans.md). Attention
/// heads are not cut through: if there are fewer than ranks, several ranks get a copy of the same head. Local; several
/// threads. Holds some MiB, whatever the model's size.
///
/// To a workspace: states have the metadata of shards as their config (docs/inspecting.md); files that are no weights
/// lie beside them; one that is there and other is Error(argument), unless forced. The job has a generation when all
/// its states are there; what was written before a failure is removed.
///
/// Throws Error(argument) on names without a rule, rules without a way back, an `out` that exists, a layout that the
/// plan does not know or that leaves a rank without a head, a layer or an expert, a model that is not as its
/// config.json says, a cut through the blocks of a quantisation scale (but of 8-bit floats); Error(not_found | corrupt
/// | io | no_space) from reading and writing; with `to_plan` also as export_model.
ShardReport shard_model(const std::string& model_dir, const std::string& out, const std::string& plan,
                        const ParallelLayout& layout, const ShardOptions& options = {});

/// The N of a directory with rank-00000-of-0000N.safetensors, or the ranks of a workspace's job or of a foreign
/// checkpoint (`shards` as in ExportOptions), which is of one rank if it is whole. Throws
/// Error(not_found) if there is none or if one is missing (it is named), Error(argument) if the files are of
/// sets of different sizes. Local.
int count_shards(const std::string& shards_dir, const std::string& job = {}, const std::string& shards = {});

/// All of these but `stop` count on rank 0 alone.
struct ExportOptions {
  bool force = false;                            ///< as for sharding
  std::uint64_t max_shard_size = 5'000'000'000;  ///< bytes of tensors in one file of the checkpoint
  std::uint64_t memory_budget = 256 << 20;       ///< bytes of memory of all ranks together for bytes on their way
  /// None: owners if the group is of several hosts and `out` is on a network file system, and for a foreign checkpoint
  /// that every rank can read whole; else first, because writers of one file wait for each other.
  std::optional<Writers> writers = {};
  std::optional<ParallelLayout> layout = {};  ///< of the shards; none: what they say, else tensor parallelism alone
  std::optional<ParallelLayout> to = {};      ///< shards of this layout are made instead of one checkpoint
  /// The plan that those are cut by, one without views; empty: that of the ranks, or "auto" if that has views.
  std::string to_plan = {};
  /// Floating point tensors are cast to f32, f16 or bf16 as they are read, to the nearest, ties to even. A finite
  /// number that would become infinite, and a tensor of 8 or 4 bits, are errors. Integers stay.
  std::optional<DType> dtype = {};
  /// Casts also the tensors that the base, or the source where there is no base, keeps in F32 beside another dtype.
  bool cast_all = false;
  /// Goes on with what an earlier export of the same shards to the same `out` left, as far as that verifies; and on
  /// failure leaves what there is for the next one.
  bool resume = false;
  /// A model's directory: config.json, tokenizer and other files that are no weights come from there, and not from
  /// beside the shards; its config.json counts for the plan and is held against the tensors. With this or `dtype`,
  /// config.json gets the dtype of the tensors, and loses its "quantization_config" if none of them is quantised.
  std::string base = {};
  std::string select = {};   ///< a glob, as a plan's: only tensors whose names in the result it fits; empty: all
  std::string exclude = {};  ///< likewise: not these
  bool checksums = false;    ///< write muster.checksums.json beside the checkpoint, for `muster verify`
  /// Of a workspace, and then the same on all ranks: how the job's nonce begins, and which generation; none: the newest
  /// one of which all of the job's ranks have a complete state.
  std::string job = {};
  std::optional<std::uint64_t> generation = {};
  std::string at = {};      ///< of files of torch.save: the key that has the weights (docs/checkpoints.md)
  std::string shards = {};  ///< of files of ranks: their names, with {rank} for the number
  std::string carry = {};   ///< as for sharding
  std::optional<std::chrono::seconds> abandoned_after = {};  ///< likewise
  ProgressCallback progress = {};
  /// On any rank: a stop request ends the export on all of them with Error(cancelled), and the group with it. Nothing
  /// is left behind, unless `resume`.
  std::stop_token stop = {};
};

/// One tensor of a rank.
struct AccountedSource {
  int rank = 0;
  std::string name;
  TensorSpec spec;
};
/// What becomes of the ranks' tensors of one name.
struct AccountedTensor {
  std::string name;      ///< in the result; empty if a rule drops it
  std::string origin;    ///< the ranks' name, with the model's numbers of layers and experts
  std::size_t rule = 0;  ///< of the plan, from 1 on
  std::string action;
  TensorSpec spec;  ///< of the result
  std::vector<AccountedSource> sources;
  std::string file;         ///< of the checkpoint; empty if several shards have parts of it
  std::string reason = {};  ///< of a dropped one: why, if the plan says so
};
/// Every tensor of every rank is in `tensors` or in `dropped`, once.
struct ExportAccount {
  std::string plan;
  ParallelLayout layout;             ///< of the shards
  std::optional<ParallelLayout> to;  ///< where shards are made
  std::vector<AccountedTensor> tensors;
  std::vector<AccountedTensor> dropped;
  std::uint64_t tensors_in = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t tensors_out = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t files = 0;
  std::vector<std::string> notes = {};  ///< as ShardReport's; and that the given plan is not the shards' own
};

struct ExportReport {
  ExportAccount account;            ///< this and all below are filled on rank 0 alone
  std::uint64_t files_resumed = 0;  ///< that were there already, and verified
  std::uint64_t bytes_resumed = 0;
  Writers writers = Writers::first;          ///< that were given, or chosen
  std::vector<std::uint64_t> bytes_written;  ///< by each rank
  std::uint64_t windows = 0;                 ///< pieces that several ranks put together in shared memory
  Omissions left = {};                       ///< files that did not go along
  double seconds = 0;                        ///< of everything
};

/// The ranks of `group` (P) merge N shards by the plan into one checkpoint in HuggingFace's layout, or into the shards
/// of another layout, with the files that are no weights. Rank r reads the shards r, r + P, ...; bytes go straight from
/// a shard to the file where its reader writes them, else through windows in shared memory (Writers). No rank holds
/// more than some windows. `plan` is a built-in plan's name, "auto" or a file, read on rank 0; empty: the one that
/// the shards say they were cut by. Shards of muster's own are held against their checksums as they are read, and the
/// model against config.json before anything is written. All parameters count on rank 0 (`shards_dir` on every rank).
/// `out` appears whole or not at all; nothing is left behind on failure.
///
/// Collective. One rank's failure is thrown on all, with its words and its rank: Error(argument | rank_mismatch |
/// corrupt | not_found | io | no_space), after which the group is usable; Error(timeout | peer_lost) as gather.hpp has
/// them.
ExportReport export_model(const std::string& shards_dir, const std::string& out, const std::string& plan,
                          SyncGroup& group, const ExportOptions& options = {});

/// What export_model would do, with nothing written. Local: reads the headers of all shards. Throws as export_model.
ExportAccount plan_export(const std::string& shards_dir, const std::string& plan, const ExportOptions& options = {});

}  // namespace muster

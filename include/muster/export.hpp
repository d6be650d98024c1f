// SPDX-License-Identifier: Apache-2.0
#pragma once
// Splits a checkpoint into one file per rank (shard_model), and merges such shards into a checkpoint (export_model).
// The commands `muster shard` and `muster export` call these functions. A shard and an export by the same plan preserve
// names, dtypes, shapes and tensor bytes.

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

/// The ranks that write the files of an export.
enum class Writers : std::uint8_t {
  first,   ///< only rank 0: for an output file system that the other ranks cannot access
  owners,  ///< every rank writes its own data; parts that several ranks hold are divided by size
};
/// Returns "first" or "owners".
std::string_view to_string(Writers writers) noexcept;

/// Options of shard_model().
struct ShardOptions {
  /// Replaces `out` if it is a checkpoint or a directory of shards and contains no other files.
  bool force = false;
  /// Treats `out` as a workspace, which is created if it does not exist. The shard of each rank becomes its state of
  /// generation 1 of a new job.
  bool to_workspace = false;
  std::optional<int> zstd_level = {};  ///< compression of states; unset: not compressed
  std::string carry = {};              ///< selects the files to copy in addition to the weights (model_dir.hpp)
  /// For rank shards that `to_plan` splits again: their layout, as ExportOptions::layout.
  std::optional<ParallelLayout> from = {};
  std::string at = {};                           ///< as ExportOptions::at, for third-party checkpoints
  std::string shards = {};                       ///< as ExportOptions::shards, for one file per rank
  std::string job = {};                          ///< as ExportOptions::job, for a workspace
  std::optional<std::uint64_t> generation = {};  ///< as ExportOptions::generation, for a workspace
  /// A model directory, as ExportOptions::base: source of the files that are not weights, and of the config.json that
  /// plans read.
  std::string base = {};
  /// The target plan. If it is set, `plan` first converts the source to Hugging Face names and shapes, as
  /// export_model() does, and `to_plan` then splits the result. Use it for rank shards, and for checkpoints with other
  /// names or shapes. Empty: the source has Hugging Face names, and `plan` splits it.
  std::string to_plan = {};
  /// Applies to unfinished outputs for the same `out` that were left by processes of other hosts and have not changed
  /// for this time. They are deleted, or resumed if `resume` is set. Unset: only outputs of processes that ran on this
  /// host and are proved dead.
  std::optional<std::chrono::seconds> abandoned_after = {};
  bool dry_run = false;  ///< writes nothing; the report is the expected one, and `out` is not inspected
  ProgressCallback progress = {};
  /// A stop request ends the call with Error(cancelled). No output is left behind.
  std::stop_token stop = {};
};

/// The result of shard_model().
struct ShardReport {
  std::uint64_t tensors = 0;        ///< of the model
  std::uint64_t bytes = 0;          ///< bytes of the tensors of the model
  std::uint64_t bytes_written = 0;  ///< bytes of the tensors of the shards, including replicated and padded ones
  std::string job = {};             ///< for a workspace: the nonce of the new job, 32 hexadecimal digits
  Omissions left = {};              ///< files that were not copied
  /// Remarks for users of the shards: heads that several ranks hold, unused rules.
  std::vector<std::string> notes = {};
  double seconds = 0;
};

/// Splits the model in `model_dir` into rank-00000-of-0000N.safetensors ..., and copies the files that are not weights
/// (`carry`). Local; uses several threads and a few MiB of memory, whatever the size of the model.
///
/// `model_dir` has the Hugging Face layout, or is a self-describing third-party checkpoint. `plan` is the name of a
/// built-in plan, "auto" or a file; the split applies its inverse. `out` appears complete or not at all, and a failure
/// leaves no files behind. A dimension that is not divisible by the number of ranks is padded with zeros. The metadata
/// of each shard records the true size, the plan and the checksums (docs/plans.md). Attention heads are not split: if
/// there are fewer heads than ranks, several ranks get a copy of the same head.
///
/// With `to_workspace`, the config of each state is the metadata of a shard (docs/inspecting.md). Files that are not
/// weights are stored next to the states; if such a file exists with other contents, the call throws Error(argument)
/// unless `force` is set. The generation is complete when all its states exist. A failure deletes the states that were
/// already written.
///
/// Throws Error(argument) if:
/// - a tensor matches no rule, or a rule is not invertible;
/// - `out` exists;
/// - the plan does not support the layout, or the layout leaves a rank without a head, a layer or an expert;
/// - the model contradicts its config.json;
/// - a split would cut a quantization block (except with FP8).
///
/// Throws Error(not_found | corrupt | io | no_space) if reading or writing fails. With `to_plan`, throws also as
/// export_model().
ShardReport shard_model(const std::string& model_dir, const std::string& out, const std::string& plan,
                        const ParallelLayout& layout, const ShardOptions& options = {});

/// Returns the number of ranks of a directory with rank-00000-of-0000N.safetensors, of the job of a workspace, or of a
/// third-party checkpoint (`shards` as in ExportOptions). A checkpoint without rank shards has one rank. Throws
/// Error(not_found) if no shard exists or one is missing, with its name. Throws Error(argument) if the files belong to
/// sets of different sizes. Local.
int count_shards(const std::string& shards_dir, const std::string& job = {}, const std::string& shards = {});

/// Options of an export. Only rank 0 uses them, except for `stop`, `job` and `generation`.
struct ExportOptions {
  bool force = false;                            ///< as ShardOptions::force
  std::uint64_t max_shard_size = 5'000'000'000;  ///< most bytes of tensors in one file of the checkpoint
  std::uint64_t memory_budget = 256 << 20;       ///< bytes of buffers of all ranks together
  /// Unset: `owners` if the group spans several hosts and `out` is on a network file system, and for a third-party
  /// checkpoint that every rank can read completely. Otherwise `first`, because concurrent writers of one file wait for
  /// each other.
  std::optional<Writers> writers = {};
  /// Layout of the shards; unset: the recorded layout, else tensor parallelism only.
  std::optional<ParallelLayout> layout = {};
  std::optional<ParallelLayout> to = {};  ///< writes shards of this layout instead of one checkpoint
  /// The plan that splits for `to`; it must not have views. Empty: the plan of the source, or "auto" if that plan has
  /// views.
  std::string to_plan = {};
  /// Casts floating-point tensors to f32, f16 or bf16 while they are read, rounding to nearest, ties to even. A finite
  /// number that would become infinite is an error. So is a tensor with elements of 8 or 4 bits. Integers are not cast.
  std::optional<DType> dtype = {};
  /// Also casts tensors that are F32 in a model with another main dtype. The base decides which these are, or the
  /// source if there is no base.
  bool cast_all = false;
  /// Continues an earlier export of the same shards to the same `out`, and keeps the part of its output that verifies.
  /// If this export fails, its partial output is kept for the next one.
  bool resume = false;
  /// A model directory. config.json, the tokenizer and other files that are not weights are copied from it, not from
  /// the directory of the shards. Its config.json is used for the plan and checked against the tensors. With `base` or
  /// `dtype`, the new config.json states the dtype of the tensors. If no tensor is quantized, its "quantization_config"
  /// is removed.
  std::string base = {};
  std::string select = {};   ///< a glob, as in a plan: exports only tensors with a matching output name; empty: all
  std::string exclude = {};  ///< a glob: does not export tensors with a matching output name
  bool checksums = false;    ///< writes muster.checksums.json next to the checkpoint, for `muster verify`
  /// Workspace only; the same on all ranks. `job` is a prefix of the nonce of the job. An unset `generation` selects
  /// the newest one for which every rank of the job has a complete state.
  std::string job = {};
  std::optional<std::uint64_t> generation = {};
  std::string at = {};      ///< for files of torch.save: the key of the weights (docs/checkpoints.md)
  std::string shards = {};  ///< for one file per rank: the file names, with {rank} for the number
  std::string carry = {};   ///< as ShardOptions::carry
  std::optional<std::chrono::seconds> abandoned_after = {};  ///< as ShardOptions::abandoned_after
  ProgressCallback progress = {};
  /// A stop request on any rank ends the export on all ranks with Error(cancelled), and aborts the group. Partial
  /// output is deleted, unless `resume` is set.
  std::stop_token stop = {};
};

/// A source tensor on one rank.
struct AccountedSource {
  int rank = 0;
  std::string name;
  TensorSpec spec;
};
/// The result of all source tensors of one name.
struct AccountedTensor {
  std::string name;      ///< name in the output; empty if a rule drops the tensor
  std::string origin;    ///< name on the ranks, with the layer and expert numbers of the model
  std::size_t rule = 0;  ///< number of the rule in the plan, from 1
  std::string action;
  TensorSpec spec;  ///< dtype and shape in the output
  std::vector<AccountedSource> sources;
  std::string file;         ///< file of the checkpoint; empty if several shards hold parts of the tensor
  std::string reason = {};  ///< for a dropped tensor: the reason, if the plan gives one
};
/// An account of an export. Every tensor of every rank is listed exactly once, in `tensors` or in `dropped`.
struct ExportAccount {
  std::string plan;
  ParallelLayout layout;             ///< layout of the source shards
  std::optional<ParallelLayout> to;  ///< layout of the new shards; unset for a checkpoint
  std::vector<AccountedTensor> tensors;
  std::vector<AccountedTensor> dropped;
  std::uint64_t tensors_in = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t tensors_out = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t files = 0;
  /// As ShardReport::notes; also reports that `plan` differs from the plan of the shards.
  std::vector<std::string> notes = {};
};

/// The result of export_model().
struct ExportReport {
  ExportAccount account;            ///< only rank 0 fills this and the members below
  std::uint64_t files_resumed = 0;  ///< files of an earlier export that verified and were kept
  std::uint64_t bytes_resumed = 0;
  Writers writers = Writers::first;          ///< given by the options, or chosen
  std::vector<std::uint64_t> bytes_written;  ///< one per rank
  std::uint64_t windows = 0;                 ///< shared-memory buffers that several ranks filled together
  Omissions left = {};                       ///< files that were not copied
  double seconds = 0;                        ///< duration of the whole call
};

/// Merges N shards into one checkpoint in the Hugging Face layout, or into shards of another layout, and copies the
/// files that are not weights. Collective over `group`. Only rank 0 uses the parameters, except that every rank passes
/// `shards_dir`.
///
/// With P ranks, rank r reads the shards r, r + P, ... A rank that writes its own data copies bytes directly from the
/// shard to the file. Otherwise the bytes pass through windows (staging buffers) in shared memory (Writers). A rank
/// holds at most a few windows. `plan` is the name of a built-in plan, "auto" or a file, which rank 0 reads. An empty
/// `plan` selects the plan that the shards record. Shards that Muster wrote are checked against their checksums while
/// they are read. The model is checked against config.json before anything is written. `out` appears complete or not at
/// all, and a failure leaves no files behind.
///
/// If one rank fails, all ranks throw its error, with its message and rank. After Error(argument | rank_mismatch |
/// corrupt | not_found | io | no_space) the group remains usable. Error(timeout | peer_lost | cancelled) aborts it.
ExportReport export_model(const std::string& shards_dir, const std::string& out, const std::string& plan,
                          SyncGroup& group, const ExportOptions& options = {});

/// Returns what export_model() would do, without writing anything. Local; reads the headers of all shards. Throws as
/// export_model().
ExportAccount plan_export(const std::string& shards_dir, const std::string& plan, const ExportOptions& options = {});

}  // namespace muster

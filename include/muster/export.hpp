// SPDX-License-Identifier: Apache-2.0
#pragma once
// Splits a checkpoint into shards, one file per rank (shard_model), and merges such shards into a checkpoint
// (export_model). The commands `muster shard` and `muster export` call these functions. If a model is split and its
// shards are exported by the same plan, the result has the same names, dtypes, shapes and tensor bytes. A plan is a
// list of rules that describe how each tensor is split and merged (docs/reference/plans.md). Third-party checkpoints
// are those of other programs; docs/reference/exports.md lists them, and explains which are self-describing.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "muster/fingerprint.hpp"
#include "muster/group.hpp"
#include "muster/model_dir.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/plan.hpp"
#include "muster/progress.hpp"

namespace muster {

/// The ranks that write the files of an export.
enum class Writers : std::uint8_t {
  rank0,  ///< only rank 0: for ranks of one host, or if the other ranks cannot access the file system of the output
  all,    ///< every rank writes its own data, and a share of the data that is joined from several ranks
};
/// Returns "rank0" or "all".
std::string_view to_string(Writers writers) noexcept;

/// Options of shard_model().
struct ShardOptions {
  /// Replaces `out` if it is a checkpoint or a directory of shards and contains no other files.
  bool force = false;
  /// Treats `out` as a workspace, which is created if it does not exist. The shard of each rank becomes its state of
  /// step 1 of a new job.
  bool to_workspace = false;
  std::optional<int> zstd_level = {};  ///< compression of states; unset: not compressed
  std::string extra_files = {};        ///< selects the files to copy besides the weights, as extra_files_of() does
  /// If the source consists of shards of ranks, which `to_plan` splits again: their layout, as
  /// ExportOptions::source_layout.
  std::optional<ParallelLayout> source_layout = {};
  std::string key = {};                    ///< as ExportOptions::key, for third-party checkpoints
  std::string file_pattern = {};           ///< as ExportOptions::file_pattern, for one file per rank
  std::string job_id = {};                 ///< as ExportOptions::job_id, for a workspace
  std::optional<std::uint64_t> step = {};  ///< as ExportOptions::step, for a workspace
  /// A model directory, as ExportOptions::base_model: source of the files that are not weights, and of the config.json
  /// that plans read.
  std::string base_model = {};
  /// The plan that splits. If it is set, `plan` first merges or converts the source to Hugging Face names and shapes,
  /// as export_model() does, and `to_plan` then splits the result. Use it for shards of ranks, and for checkpoints with
  /// other names or shapes. Empty: the source has Hugging Face names, and `plan` splits it.
  std::string to_plan = {};
  /// Unfinished outputs of earlier calls with the same `out` are deleted (or resumed, for ExportOptions::resume) if
  /// their process ran on this host and is proved dead. If this time is set, unfinished outputs of other processes are
  /// treated likewise if they have not changed for that long.
  std::optional<std::chrono::seconds> stale_after = {};
  std::string select = {};   ///< as ExportOptions::select
  std::string exclude = {};  ///< as ExportOptions::exclude
  bool dry_run = false;      ///< writes nothing; the report is the expected one, and `out` is not inspected
  /// Receives reports of the progress.
  ProgressCallback progress = {};
  /// A stop request ends the call with Error(cancelled). No output is left behind.
  std::stop_token stop = {};
};

/// The result of shard_model().
struct ShardReport {
  std::uint64_t tensors = 0;        ///< number of tensors of the model
  std::uint64_t bytes = 0;          ///< bytes of the tensors of the model
  std::uint64_t bytes_written = 0;  ///< bytes of the tensors of the shards, including replicated and padded ones
  std::string job = {};             ///< for a workspace: the number of the new job, 32 hexadecimal digits
  Omissions skipped = {};           ///< files that were not copied
  /// Remarks for users of the shards: attention heads that several ranks hold, unused rules.
  std::vector<std::string> notes = {};
  /// Duration of the call.
  double seconds = 0;
};

/// Splits the model in `model_dir` into files rank-00000-of-0000N.safetensors ... in the new directory `out`, one per
/// rank of `target_layout`, and copies the files that are not weights (`extra_files`). Local; uses several threads and
/// a few MiB of memory, whatever the size of the model.
///
/// `model_dir` has the Hugging Face layout, or is a self-describing third-party checkpoint. `plan` is the name of a
/// built-in plan, "auto" (selects one by config.json) or a file. Its rules describe the merge; the split inverts them.
/// `out` appears complete or not at all, and a failure leaves no files behind. A dimension that is not divisible by the
/// number of ranks is padded with zeros. The metadata of each shard records the true size, the plan and the checksums
/// (docs/reference/plans.md). Attention heads are not split: if there are fewer heads than ranks, several ranks get a
/// copy of the same head.
///
/// With `to_workspace`, the config of each state is the metadata of a shard (docs/reference/shard-file.md). Files that
/// are not weights are stored next to the states; if such a file exists with other contents, the call throws
/// Error(invalid_argument) unless `force` is set. The step is complete when all its states exist. A failure deletes the
/// states that were already written.
///
/// Throws Error(invalid_argument) if:
/// - a tensor matches no rule, or a rule is not invertible;
/// - `out` exists;
/// - the plan does not support the layout, or the layout leaves a rank without a head, a layer or an expert;
/// - the model contradicts its config.json;
/// - a split would cut a quantization block (except with FP8).
///
/// Throws Error(not_found | corrupt | io | out_of_space) if reading or writing fails. With `to_plan`, throws also as
/// export_model().
ShardReport shard_model(const std::string& model_dir, const std::string& out, const ParallelLayout& target_layout,
                        const std::string& plan, const ShardOptions& options = {});

/// Returns the number of ranks whose shards a source contains. The source is a directory with
/// rank-00000-of-0000N.safetensors, a workspace (`job` as in ExportOptions) or a third-party checkpoint (`shards` as in
/// ExportOptions). A checkpoint without rank shards has one rank. Throws Error(not_found) if no shard exists or one is
/// missing, with its name. Throws Error(invalid_argument) if the files belong to sets of different sizes. Local.
int count_shards(const std::string& shards_dir, const std::string& job = {}, const std::string& shards = {});

/// Options of an export. Only rank 0 uses them, except for `stop`, `job` and `step`.
struct ExportOptions {
  bool force = false;                            ///< as ShardOptions::force
  std::uint64_t max_shard_size = 5'000'000'000;  ///< most bytes of tensors in one file of the checkpoint
  std::uint64_t memory_budget = 256 << 20;       ///< most bytes of windows and other buffers of all ranks together
  /// Unset: `all` if the group spans several hosts and `out` is on a network file system, and for a third-party
  /// checkpoint that every rank can read completely. Otherwise `rank0`, because concurrent writers of one file wait for
  /// each other.
  std::optional<Writers> writers = {};
  /// Layout of the shards; unset: the recorded layout, else tensor parallelism only.
  std::optional<ParallelLayout> source_layout = {};
  std::optional<ParallelLayout> target_layout =
      {};  ///< if set, the result is shards of this layout, not one checkpoint
  /// The plan that splits for `to`; it must not have views (docs/reference/plans.md). Empty: the plan that merges the
  /// source, or "auto" if that plan has views.
  std::string to_plan = {};
  /// Casts floating-point tensors to f32, f16 or bf16 while they are read, rounding to nearest, ties to even. A finite
  /// number that would become infinite is an error. So is a tensor with elements of 8 or 4 bits. Integers are not cast.
  std::optional<DType> dtype = {};
  /// With `dtype`: also casts tensors that are F32 beside weights in F16 or BF16, and would otherwise remain F32. The
  /// base decides which tensors these are, or the source if there is no base.
  bool cast_all = false;
  /// Continues an earlier export of the same shards to the same `out`, and keeps the part of its output that verifies.
  /// If this export fails, its partial output is kept for the next one.
  bool resume = false;
  /// A model directory. config.json, the tokenizer and other files that are not weights are copied from it, not from
  /// the directory of the shards. Its config.json is used for the plan and checked against the tensors. With `base` or
  /// `dtype`, the new config.json states the dtype of the tensors. If no tensor is quantized, its "quantization_config"
  /// is removed.
  std::string base_model = {};
  std::string select = {};   ///< a glob, as in a plan: exports only tensors with a matching output name; empty: all
  std::string exclude = {};  ///< a glob: does not export tensors with a matching output name
  /// Writes muster.checksums.json next to the checkpoint, for `muster verify`. The files are read again for it, unless
  /// `fingerprint` is set.
  bool checksums = false;
  /// Computes ExportReport::fingerprint from the bytes that are written, without reading the files again. With
  /// `checksums`, muster.checksums.json has these CRCs ("crc64-xz"), so it also detects that a disk has stored other
  /// bytes than the ranks had.
  bool fingerprint = false;
  /// Workspace only; the same on all ranks. `job` is a prefix of the number of the job, needed if the workspace has
  /// states of several jobs. An unset `step` selects the newest one of which every rank of the job has a complete
  /// state.
  std::string job_id = {};
  /// See `job_id`.
  std::optional<std::uint64_t> step = {};
  std::string key = {};           ///< for third-party checkpoints: the key, or the prefix of the names, of the weights
  std::string file_pattern = {};  ///< for one file per rank: the file names, with {rank} for the number
  std::string extra_files = {};   ///< as ShardOptions::extra_files
  /// Texts by file name. They are written next to the weights, and replace files of the same name that would be copied.
  /// A "config.json" takes the place of the one of `base_model`: it is used for the plan and checked, and is written
  /// unchanged. A name must not contain a directory, and must not be that of a file with weights or of an index.
  std::map<std::string, std::string> files = {};
  /// Compares tensors that several ranks have. If they differ, the export ends with Error(rank_mismatch). If false, the
  /// values of one rank are used, without a check.
  bool check_replicas = true;
  std::optional<std::chrono::seconds> stale_after = {};  ///< as ShardOptions::stale_after
  /// Receives reports of the progress, on rank 0 only.
  ProgressCallback progress = {};
  /// A stop request on any rank ends the export on all ranks with Error(cancelled), and aborts the group. Partial
  /// output is deleted, unless `resume` is set.
  std::stop_token stop = {};
};

/// A source tensor on one rank.
struct SourceTensor {
  /// The rank in the layout of the source.
  int rank = 0;
  /// The name of the tensor on that rank.
  std::string name;
  /// The dtype and shape of the tensor on that rank.
  TensorSpec spec;
};
/// The outcome for all source tensors of one name.
struct TensorMapping {
  std::string name;      ///< name in the output; empty if a rule drops the tensor
  std::string origin;    ///< name on the ranks, with the layer and expert numbers of the model
  std::size_t rule = 0;  ///< number of the rule in the plan, from 1
  std::string action;    ///< action of that rule, as in docs/reference/plans.md
  TensorSpec spec;       ///< dtype and shape in the output
  /// The tensors of the ranks that the rule joins.
  std::vector<SourceTensor> sources;
  std::string file;         ///< file of the checkpoint; empty if several shards hold parts of the tensor
  std::string reason = {};  ///< for a dropped tensor: the reason, if the plan gives one
};
/// The manifest of an export. Every tensor of every rank is listed exactly once, in `tensors` or in `dropped`.
struct ExportManifest {
  /// The name of the plan.
  std::string plan;
  ParallelLayout source_layout;                 ///< layout of the source shards
  std::optional<ParallelLayout> target_layout;  ///< layout of the new shards; unset for a checkpoint
  /// The tensors of the result.
  std::vector<TensorMapping> tensors;
  /// The tensors that rules drop.
  std::vector<TensorMapping> dropped;
  std::uint64_t tensors_in = 0;  ///< number of tensors of all ranks
  /// Bytes of the tensors of all ranks.
  std::uint64_t bytes_in = 0;
  std::uint64_t tensors_out = 0;  ///< number of tensors in the result
  /// Bytes of the tensors of the result.
  std::uint64_t bytes_out = 0;
  std::uint64_t files = 0;  ///< number of files with weights in the result
  /// As ShardReport::notes; also reports that `plan` differs from the plan of the shards.
  std::vector<std::string> notes = {};
};

/// The result of export_model().
struct ExportReport {
  ExportManifest manifest;          ///< only rank 0 fills this and the members below
  std::uint64_t files_resumed = 0;  ///< files of an earlier export that verified and were kept
  /// Bytes of the tensors of these files.
  std::uint64_t bytes_resumed = 0;
  Writers writers = Writers::rank0;          ///< given by the options, or chosen
  std::vector<std::uint64_t> bytes_written;  ///< one per rank
  std::uint64_t windows = 0;                 ///< shared-memory buffers that several ranks filled together
  Omissions skipped = {};                    ///< files that were not copied
  double seconds = 0;                        ///< duration of the whole call
  /// Set if ExportOptions::fingerprint is: equal to fingerprint_of() of the output. Files that `resume` keeps are read.
  std::optional<Fingerprint> fingerprint = {};
};

/// Merges N shards into one checkpoint in the Hugging Face layout, or into shards of another layout, and copies the
/// files that are not weights. Collective over `group`. Every rank passes `shards_dir` and the options that
/// ExportOptions names; only rank 0 uses the other parameters.
///
/// With P ranks, rank r reads the shards r, r + P, ... A rank that writes its own data copies bytes directly from the
/// shard to the file. All other bytes pass through windows: staging buffers in the shared memory of the rank that
/// writes them. A rank holds at most a few windows. `plan` is the name of a built-in plan, "auto" or a file, which rank
/// 0 reads. An empty `plan` selects the plan that the shards record. Shards that Muster wrote are checked against their
/// checksums while they are read. The model is checked against config.json before anything is written. `out` appears
/// complete or not at all, and a failure leaves no files behind.
///
/// If one rank fails, all ranks throw its error, with its message and rank. After Error(invalid_argument |
/// rank_mismatch | corrupt | not_found | io | out_of_space) the group remains usable. Error(timeout | peer_lost |
/// cancelled) aborts it.
ExportReport export_model(const std::string& shards_dir, const std::string& out, const std::string& plan, Group& group,
                          const ExportOptions& options = {});

/// Returns what export_model() would do, without writing anything. Local; reads the headers of all shards. Throws as
/// export_model().
ExportManifest plan_export(const std::string& shards_dir, const std::string& plan, const ExportOptions& options = {});

}  // namespace muster

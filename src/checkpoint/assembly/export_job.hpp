// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rank 0's computations before any bytes are moved, from the headers of all shards: the output files (one checkpoint,
// or the shards of another layout), and the use of every tensor of every rank.

#include <cstdint>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/checkpoint/assembly/request.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/plan_views.hpp"

namespace muster {

struct ExportOutputs {
  std::vector<OutputFile> files;
  std::vector<std::vector<SourceRef>> equal;  ///< sets of sources that must be bit-identical
  std::vector<std::string> equal_names;       ///< the tensors of these sets
  std::string index;                          ///< the index of a checkpoint of several files; otherwise empty
  std::string index_name;                     ///< set like `index`
  std::vector<std::string> notes;             ///< for shards: the notes of Placement
};

/// Returns a checkpoint in Hugging Face's layout. Throws as split_into_files.
ExportOutputs checkpoint_outputs(const Arrangement& arrangement, std::uint64_t max_shard_size, const Metadata& metadata,
                                 std::string_view stem = "model");

/// Reserves space for the checksums of a shard's tensors in its metadata. Returns false if the header would be too
/// long.
bool make_room_for_checksums(OutputFile& file);

/// Returns one shard per rank of `layout`. Throws as place().
ExportOutputs shard_outputs(const Arrangement& arrangement, const MergePlan& plan, const ParallelLayout& layout,
                            const Metadata& metadata);

/// Returns a whole model as an arrangement: every tensor has one source, the only rank, under the name that the plan
/// gives it in reverse. Throws Error(invalid_argument) that lists the names without a rule.
Arrangement arrange_model(const MergePlan& plan, std::span<const NamedSpec> model);

struct ExportJob {
  MergePlan plan;                                     ///< owns the arrangement's rules
  std::vector<RankTensors> ranks = {};                ///< the inputs of the rules
  std::vector<std::vector<ViewedTensor>> views = {};  ///< of each rank; empty: the tensors are those of its shard
  std::vector<std::vector<LeftOut>> left_out = {};    ///< by views, for each rank
  std::vector<std::size_t> counts = {};               ///< number of tensors in each rank's shard
  ExportOutputs outputs = {};
  ExportManifest account = {};        ///< every tensor of every rank, and its use
  std::string config_text = {};       ///< the new config.json; empty: it is copied unchanged
  std::optional<Config> config = {};  ///< the config that the plan used; nullopt if there is none
  std::string fingerprint = {};       ///< equal for equal shards, results and files
};

/// Converts the options of an export to a request.
Request request_of(const std::string& path, const std::string& plan, const ExportOptions& options);

/// Plans an export. `source` is that of this process; `listings` are those of all processes, in any order. Throws as
/// export_model.
ExportJob plan_job(const Request& request, const ExportSource& source, std::vector<ShardListing> listings);

/// Checks a whole model that was exported by boxes in units, as plan_job() does. Returns the new config.json; empty: it
/// is copied unchanged, or there is none. Throws as export_model.
std::string config_text_for(const Request& request, std::span<const NamedSpec> model, std::vector<std::string>& notes);

/// Decides which ranks write if the options do not. `all_have_all`: every rank can read the whole source. `by_network`:
/// the ranks are on several hosts that share the output's file system.
Writers writers_of(const ExportOptions& options, bool all_have_all, bool by_network);

/// The size of windows and their number per writer, chosen so that all windows and the other buffers of each process
/// fit the budget. `spread`: the ranks are on several hosts, which send each other parts of windows. shape_windows()
/// throws Error(invalid_argument) if the budget is too small.
struct WindowShape {
  std::uint64_t bytes = 0;
  std::uint32_t depth = 2;
  /// The number of window-sized buffers of all processes: each writer has its windows, and one buffer for items that it
  /// assembles alone.
  [[nodiscard]] std::uint64_t pieces(int processes, Writers writers) const noexcept {
    return (writers == Writers::rank0 ? 1 : static_cast<std::uint64_t>(processes)) * (depth + std::uint64_t{1});
  }
};
/// For muster shard, which is one process: the windows of all files that it writes at the same time.
inline constexpr std::uint64_t shard_window_bytes = 8 << 20;
WindowShape shape_windows(std::uint64_t budget, int processes, Writers writers, bool spread);

}  // namespace muster

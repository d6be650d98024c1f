// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the first process works out before a byte moves, from what all shards say of themselves: the files, one
// checkpoint or the shards of another layout, and what becomes of every tensor of every rank.

#include <cstdint>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/assembly.hpp"
#include "src/checkpoint/plan_views.hpp"
#include "src/checkpoint/request.hpp"
#include "src/checkpoint/shard_set.hpp"

namespace muster {

struct ExportOutputs {
  std::vector<OutputFile> files;
  std::vector<std::vector<SourceRef>> equal;  ///< sets of sources that must be bit for bit equal
  std::vector<std::string> equal_names;       ///< the tensors that they are of
  std::string index;                          ///< of a checkpoint of several files; else empty
  std::string index_name;                     ///< likewise
  std::vector<std::string> notes;             ///< of shards: Placement's
};

/// HuggingFace's layout. Throws as plan_shards.
ExportOutputs checkpoint_outputs(const Arrangement& arrangement, std::uint64_t max_shard_size, const Metadata& metadata,
                                 std::string_view stem = "model");

/// Puts a place for the checksums of a shard's tensors into its metadata. False if the header would be too long.
bool make_room_for_checksums(OutputFile& file);

/// A shard a rank of `layout`. Throws as place().
ExportOutputs shard_outputs(const Arrangement& arrangement, const MergePlan& plan, const ParallelLayout& layout,
                            const Metadata& metadata);

/// A whole model as an arrangement: every tensor from the one rank that there is, under the name that the plan has for
/// it backwards. Throws Error(argument) that lists the names without a rule.
Arrangement arrange_model(const MergePlan& plan, std::span<const NamedSpec> model);

struct ExportJob {
  MergePlan plan;                                     ///< the arrangement's rules are its
  std::vector<RankTensors> ranks = {};                ///< what the rules are for
  std::vector<std::vector<ViewedTensor>> views = {};  ///< of each rank; empty: its tensors are those of its shard
  std::vector<std::vector<LeftOut>> left_out = {};    ///< by views, of each rank
  std::vector<std::size_t> counts = {};               ///< tensors of each rank's shard
  ExportOutputs outputs = {};
  ExportAccount account = {};         ///< every tensor of every rank, and what becomes of it
  std::string config_text = {};       ///< of config.json; empty: as it is where it comes from
  std::optional<Config> config = {};  ///< that counted for the plan; none: there is none
  std::string fingerprint = {};       ///< the same for the same shards, results and files
};

/// The request of an export.
Request request_of(const std::string& path, const std::string& plan, const ExportOptions& options);

/// `shards`: of this process; `listings`: of all shards, in any order. Throws as export_model.
ExportJob plan_job(const Request& request, const ShardSet& shards, std::vector<ShardListing> listings);

/// Who writes, if the options leave that open. `all_have_all`: every rank can read the whole source; `by_network`: the
/// ranks are on several hosts that share the output's file system.
Writers writers_of(const ExportOptions& options, bool all_have_all, bool by_network);

/// Windows, and how many of them each writer has, so that all of them and what each process holds beside are within the
/// budget; `spread`: over several hosts, which send each other parts of windows. Throws Error(argument) if it is too
/// small for anything.
struct WindowShape {
  std::uint64_t bytes = 0;
  std::uint32_t depth = 2;
  /// Of so many processes together: beside its windows every writer has one piece of its own for what it puts together
  /// alone.
  [[nodiscard]] std::uint64_t pieces(int processes, Writers writers) const noexcept {
    return (writers == Writers::first ? 1 : static_cast<std::uint64_t>(processes)) * (depth + std::uint64_t{1});
  }
};
/// Of muster shard, which is one process: all files that it writes side by side.
inline constexpr std::uint64_t shard_window_bytes = 8 << 20;
WindowShape shape_windows(std::uint64_t budget, int processes, Writers writers, bool spread);

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
// Cuts a checkpoint: the same assembly as an export's, with one process that has the whole model.

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/model_dir.hpp"
#include "muster/state_file.hpp"
#include "muster/sync_group.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/agreement.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/assembly.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/export_job.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/checkpoint/shard_job.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/core/parallel.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"

namespace muster {
namespace {

// Code that opens a source keeps this many descriptors free.
constexpr int most_files_at_once = 128;

// Ranks of one stage have parts of the same tensors. Their files are written in parallel, in the order of the parts in
// the model. So pieces that are read for one file are still cached when another file needs them (RecentPieces).
void order_steps(std::vector<Step>& steps, const ShardJob& job, std::uint32_t files_at_once) {
  std::vector<std::pair<std::size_t, std::uint64_t>> places;
  for (std::size_t i = 0; i < job.source->tensors().size(); ++i) places.push_back(job.place_in_model(i));
  std::ranges::stable_sort(steps, {}, [&](const Step& step) {
    const merge::Rectangle& first = step.copies.front();
    const auto& [tensor, begin] = places[static_cast<std::size_t>(first.source)];
    return std::tuple(step.file / files_at_once, tensor, begin + first.from);
  });
}

void write_files(ShardJob& job, const std::string& out, const ParallelLayout& layout, const ShardOptions& options) {
  const std::vector<RankSources> ranks(1);
  const auto files_at_once = static_cast<std::uint32_t>(std::min(layout.tensor * layout.expert, most_files_at_once));
  // A power of two, so that windows begin and end at element boundaries.
  const std::uint64_t window_bytes = shard_window_bytes / std::bit_ceil(files_at_once);
  AssemblyPlan assembly =
      plan_assembly(job.outputs.files, job.outputs.equal, ranks, {1, Writers::owners, window_bytes});
  order_steps(assembly.processes.front().steps, job, files_at_once);
  OutputDirectory output(out, {options.force, options.abandoned_after});
  const std::shared_ptr<SyncGroup> group = single_group();
  const FailOnStop on_stop = fail_on_stop(*group, options.stop);
  ProcessWork& work = assembly.processes.front();
  for (const FilePlan& file : assembly.files) work.targets.push_back(grow_file(output.partial(), file));
  ProgressCounter counter(options.progress, assembly.bytes);
  std::uint64_t before = 0;
  std::function<void(std::uint64_t)> progress;
  if (options.progress) progress = [&](std::uint64_t bytes) { counter.add(bytes - std::exchange(before, bytes)); };
  assemble(
      *group, work, *job.source, {},
      [&](std::uint32_t file) {
        add_piece_checksums(assembly.files[file], work.targets[file].place, [&] { go_on(*group); });
        finish_file(assembly.files[file], work.targets[file]);
      },
      progress);
  copy_carried_files(job.carried_from, output.partial(), job.carried.names, [&] { go_on(*group); });
  job.report.left = std::move(job.carried.left);
  output.commit();
}

// Runs step 1 of write_states().
void check_carried_files(const std::string& from, const std::string& to, std::span<const std::string> names) {
  for (const std::string& name : names) {
    const std::string target = join_path(to, name);
    std::error_code error;
    if (!std::filesystem::exists(target, error)) continue;
    const auto mine = os::MappedFile::open(join_path(from, name));
    const auto there = os::MappedFile::open(target);
    if (std::ranges::equal(mine->bytes(), there->bytes())) continue;
    throw Error(
        ErrorKind::argument,
        fmt::format("sharding into the workspace {}: it has another {}; --force replaces it, or take a workspace "
                    "of its own",
                    in_quotes(to), in_quotes(name)),
        {.path = target});
  }
}

// Writes a model's shards as the states of a job in a workspace.
//
//  1. Files other than weights are compared with those of the same names in the workspace.
//  2. Each rank's state is written under a temporary name, one rank after the other, and renamed when it is complete.
//     The job's number is new, and no generation is common until all states exist, so no reader uses an incomplete set.
//  3. The other files are copied. If anything fails before that, the states that already have their names are removed.
void write_states(ShardJob& job, const std::string& path, const ShardOptions& options) {
  const std::string workspace = workspace::prepare_workspace(path).path;
  if (!options.force) check_carried_files(job.carried_from, workspace, job.carried.names);
  SyncGroup::Nonce nonce{};
  os::random_bytes(nonce);
  job.report.job = workspace::job_text(nonce);
  ProgressCounter progress(options.progress, job.report.bytes_written, options.stop);
  const int world_size = static_cast<int>(job.outputs.files.size());
  std::vector<std::string> made;  // removed unless everything succeeds
  workspace::sweep_dead(workspace);
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      OutputFile& shard = job.outputs.files[static_cast<std::size_t>(rank)];
      // States have checksums of their own.
      shard.metadata.erase(std::string(piece_checksums_key));
      const std::string name = workspace::file_name({.kind = workspace::NameKind::state,
                                                     .job = job.report.job,
                                                     .rank = rank,
                                                     .world_size = world_size,
                                                     .generation = 1});
      const StateFileOptions state{.info = {nonce, 1, rank, world_size},
                                   .zstd_level = options.zstd_level,
                                   .temporary = workspace::growing_name()};
      // If syncing the directory was the failure, the file has its name already.
      made.push_back(join_path(workspace, name));
      const MergedTensors tensors(job.source, std::vector<RankSources>(1), std::move(shard.tensors), {});
      write_state_file(tensors, made.back(), config_from_metadata(shard.metadata), state, progress);
    }
    for (const std::string& name : job.carried.names) {
      std::error_code error;
      if (!std::filesystem::exists(join_path(workspace, name), error)) made.push_back(join_path(workspace, name));
    }
    copy_carried_files(job.carried_from, workspace, job.carried.names, [&] { progress.add(0); });
  } catch (...) {
    std::error_code error;
    for (const std::string& file : made) std::filesystem::remove(file, error);
    throw;
  }
  job.report.left = std::move(job.carried.left);
}

}  // namespace

ShardReport shard_model(const std::string& model_dir, const std::string& out, const std::string& plan_name,
                        const ParallelLayout& layout, const ShardOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  if (!options.dry_run) check_not_source(model_dir, out);
  if (!options.dry_run && !options.base.empty()) check_not_source(options.base, out);
  if (!options.to_workspace) {
    if (options.zstd_level)
      throw Error(ErrorKind::argument, "safetensors files are not compressed; the states of a workspace can be");
    if (!options.dry_run) check_output(out, {options.force, {}});
  }
  const Request request{.path = model_dir,
                        .plan = plan_name,
                        .from = options.from,
                        .to = layout,
                        .to_plan = options.to_plan,
                        .base = options.base,
                        .states = {{}, options.generation, options.job},
                        .foreign = {options.at, options.shards}};
  if (options.to_plan.empty() && contents_of(model_dir, request.foreign).has_ranks())
    throw Error(ErrorKind::argument,
                fmt::format("{} has the tensors of {} ranks and is not a model: muster export {} --plan {} --ranks {} "
                            "--out DIR cuts them "
                            "anew",
                            in_quotes(model_dir), count_shards(model_dir), model_dir, plan_name, to_string(layout)),
                {.path = model_dir});
  ShardJob job(request, options.carry, !options.to_workspace);
  if (options.to_workspace && !options.dry_run) write_states(job, out, options);
  if (!options.to_workspace && !options.dry_run) write_files(job, out, layout, options);
  job.report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return std::move(job.report);
}

int count_shards(const std::string& shards_dir, const std::string& job, const std::string& shards) {
  const Contents contents = contents_of(shards_dir, {{}, shards});
  if (contents.kind == Contents::Kind::workspace) return workspace::choose_states(shards_dir, {.job = job}).world_size;
  if (contents.kind == Contents::Kind::foreign) return std::max(contents.foreign->ranks, 1);
  return contents.kind == Contents::Kind::model ? 1 : count_shard_files(shards_dir);
}

}  // namespace muster

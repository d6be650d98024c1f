// SPDX-License-Identifier: Apache-2.0
// Cutting a checkpoint: the same assembly as an export's, with one process that has the whole model.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/model_dir.hpp"
#include "muster/sync_group.hpp"
#include "src/checkpoint/agreement.hpp"
#include "src/checkpoint/assembly.hpp"
#include "src/checkpoint/assembly_files.hpp"
#include "src/checkpoint/export_job.hpp"
#include "src/checkpoint/model_config.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/checkpoint/piece_checksums.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/shard_workspace.hpp"
#include "src/checkpoint/workspace_states.hpp"
#include "src/core/parallel.hpp"
#include "src/core/progress_counter.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr std::uint64_t window_bytes = 8 << 20;

std::vector<AssemblySource> sources_of(const ModelDir& model) {
  std::vector<AssemblySource> sources;
  for (const SafetensorsFile& file : model.files())
    for (std::size_t index = 0; index < file.tensors().size(); ++index) sources.push_back(source_of(file, index));
  return sources;
}

}  // namespace

namespace {

/// A model, and what each rank gets of it.
struct ShardJob {
  ShardJob(const std::string& model_dir, const std::string& plan_name, const ParallelLayout& layout)
      : model(ModelDir::open(model_dir)),
        config(read_model_config(model_dir)),
        plan(MergePlan::load(plan_name, config ? &*config : nullptr)) {
    std::vector<NamedSpec> tensors;
    for (const TensorEntry& entry : model.tensors()) {
      tensors.push_back({entry.name, {entry.dtype, entry.shape}});
      ++report.tensors;
      report.bytes += entry.bytes;
    }
    check_against_config(plan, tensors);
    const Arrangement arrangement = arrange_model(plan, tensors);
    outputs = shard_outputs(arrangement, plan, layout, model.metadata());
    report.notes = arrangement.notes;
    report.notes.insert(report.notes.end(), outputs.notes.begin(), outputs.notes.end());
    sources = sources_of(model);
  }

  ModelDir model;
  std::optional<Config> config;
  MergePlan plan;
  ExportOutputs outputs;
  std::vector<AssemblySource> sources;
  ShardReport report;
};

void write_files(ShardJob& job, const std::string& model_dir, const std::string& out, const ShardOptions& options) {
  const std::vector<RankSources> ranks(1);
  AssemblyPlan assembly =
      plan_assembly(job.outputs.files, job.outputs.equal, ranks, {1, Writers::owners, window_bytes});
  job.report.bytes_written = assembly.bytes;
  OutputDirectory output(out, {options.force, model_dir, options.abandoned_after});
  CarriedFiles carried = carried_files(model_dir, options.carry);
  const std::shared_ptr<SyncGroup> group = single_group();
  const FailOnStop on_stop = fail_on_stop(*group, options.stop);
  std::vector<FileTarget> targets;
  for (const FilePlan& file : assembly.files) targets.push_back(grow_file(output.partial(), file));
  ProgressCounter counter(options.progress, assembly.bytes);
  std::uint64_t before = 0;
  std::function<void(std::uint64_t)> progress;
  if (options.progress) progress = [&](std::uint64_t bytes) { counter.add(bytes - std::exchange(before, bytes)); };
  assemble(
      *group, assembly.processes.front(), job.sources, targets, {window_bytes},
      [&](std::uint32_t file) {
        add_piece_checksums(assembly.files[file], targets[file].place, [&] { go_on(*group); });
        finish_file(assembly.files[file], targets[file]);
      },
      progress);
  copy_carried_files(model_dir, output.partial(), carried.names, [&] { go_on(*group); });
  job.report.left = std::move(carried.left);
  output.commit();
}

}  // namespace

ShardReport shard_model(const std::string& model_dir, const std::string& out, const std::string& plan_name,
                        const ParallelLayout& layout, const ShardOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  if (!options.dry_run) check_not_source(model_dir, out);
  if (!options.to_workspace) {
    if (options.zstd_level)
      throw Error(ErrorKind::argument, "safetensors files are not compressed; the states of a workspace can be");
    if (!options.dry_run) check_output(out, {options.force, model_dir});
  }
  ShardJob job(model_dir, plan_name, layout);
  if (options.dry_run) {
    for (const OutputFile& file : job.outputs.files)
      for (const OutputTensor& tensor : file.tensors)
        job.report.bytes_written += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
  } else if (options.to_workspace) {
    // States have checksums of their own.
    for (OutputFile& file : job.outputs.files) file.metadata.erase(std::string(piece_checksums_key));
    WorkspaceShards written = write_shards_to_workspace(job.outputs.files, job.sources, model_dir, out, options);
    job.report.bytes_written = written.bytes;
    job.report.job = std::move(written.job);
    job.report.left = std::move(written.left);
  } else {
    write_files(job, model_dir, out, options);
  }
  job.report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return std::move(job.report);
}

int count_shards(const std::string& shards_dir, const std::string& job) {
  if (is_workspace_directory(shards_dir)) return choose_states(shards_dir, {.job = job}).world_size;
  std::set<int> sizes;
  std::set<int> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(shards_dir, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto name = parse_shard_file_name(entry->path().filename().string());
    if (!name) continue;
    sizes.insert(name->ranks);
    found.insert(name->rank);
  }
  if (error) {
    throw Error(ErrorKind::not_found,
                fmt::format("reading the shards in {}: {}", in_quotes(shards_dir), error.message()),
                {.path = shards_dir, .os_error = error.value()});
  }
  if (sizes.empty()) {
    throw Error(ErrorKind::not_found,
                fmt::format("{} has no shards (rank-00000-of-0000N.safetensors); muster shard makes some",
                            in_quotes(shards_dir)),
                {.path = shards_dir});
  }
  if (sizes.size() > 1) {
    throw Error(ErrorKind::argument,
                fmt::format("{} has shards of sets of {} ranks, two sources for one model; move all but one set away",
                            in_quotes(shards_dir), fmt::join(sizes, " and of ")),
                {.path = shards_dir});
  }
  const int ranks = *sizes.begin();
  for (int rank = 0; rank < ranks; ++rank) {
    if (found.contains(rank)) continue;
    throw Error(ErrorKind::not_found,
                fmt::format("{} lacks the shard {} ({} of {} are there); copy it there, or cut the model again",
                            in_quotes(shards_dir), shard_file_name(rank, ranks), found.size(), ranks),
                {.path = shards_dir});
  }
  return ranks;
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/assembly/shard_job.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <bit>
#include <chrono>
#include <filesystem>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>
#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/group.hpp"
#include "muster/model_dir.hpp"
#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/checkpoint/assembly/checksums.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/recent_pieces.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/plan_views.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"

namespace muster {

namespace {

MergePlan cutting_plan(const ModelSource& from, const std::string& name) {
  if (name.empty() && from.plan && !has_views(*from.plan)) return *from.plan;
  return MergePlan::load(name.empty() ? "auto" : name, from.config ? &*from.config : nullptr);
}

/// Caches pieces for tensors each of whose rows may have a part in each of `files` files.
std::shared_ptr<const TensorSource> with_recent_pieces(std::shared_ptr<const TensorSource> source, std::size_t files) {
  // Twice the pieces of all ranks' windows, and for each file one at its start and one at its end.
  return std::make_shared<RecentPieces>(std::move(source), 2 * shard_window_bytes / checked_piece_bytes + 2 * files);
}

}  // namespace

ShardJob::ShardJob(const Request& request, const std::string& carry, bool side_by_side)
    : ShardJob(opened(request, carry, side_by_side)) {}

ShardJob::Opened ShardJob::opened(Request request, const std::string& carry, bool side_by_side) {
  // For a whole model, the given plan is the one that cuts it.
  if (request.to_plan.empty() && !contents_of(request.path, request.thirdparty).has_ranks()) {
    request.to_plan = request.plan.empty() ? "auto" : request.plan;
    request.plan.clear();
  }
  ModelSource model = open_model(request, carry, side_by_side);
  return {std::move(model), std::move(request)};
}

ShardJob::ShardJob(ModelSource from, const Request& request)
    : plan(cutting_plan(from, request.to_plan)),
      source(from.tensors),
      model(std::move(from.tensors)),
      set(std::move(from.set)),
      carried(std::move(from.carried)),
      carried_from(std::move(from.carried_from)) {
  report.notes = std::move(from.notes);
  const ParallelLayout& layout = *request.target_layout;
  std::vector<NamedSpec> tensors;
  for (const TensorEntry& entry : source->tensors()) {
    tensors.push_back({entry.name, {entry.dtype, entry.shape}});
    ++report.tensors;
    report.bytes += entry.bytes;
  }
  fit_to(plan, tensors);
  check_against_config(plan, tensors);
  const Arrangement arrangement = arrange_model(plan, tensors);
  outputs = shard_outputs(arrangement, plan, layout, from.metadata);
  for (const OutputFile& file : outputs.files)
    for (const MergedTensor& tensor : file.tensors)
      report.bytes_written += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
  report.notes.insert(report.notes.end(), arrangement.notes.begin(), arrangement.notes.end());
  report.notes.insert(report.notes.end(), outputs.notes.begin(), outputs.notes.end());
  if (has_views(plan)) turn_views(layout);
}

std::unique_ptr<MergedTensors> merged_of(std::shared_ptr<const TensorSource> shards, ExportJob& job,
                                         std::vector<MergedTensor> tensors) {
  std::vector<std::size_t> counts;
  for (const RankTensors& rank : job.ranks) counts.push_back(rank.tensors.size());
  if (std::ranges::any_of(job.views, [](const auto& views) { return !views.empty(); }))
    shards = std::make_shared<ViewedTensors>(shards, std::move(views_by_process(job.views, job.counts, 1).front()));
  return std::make_unique<MergedTensors>(std::move(shards), sources_by_rank(counts, 1), std::move(tensors),
                                         std::move(job.outputs.equal));
}

ModelSource open_model(Request request, const std::string& carry, bool side_by_side) {
  request.max_shard_size = UINT64_MAX;  // a single file for everything
  request.is_cut = true;
  request.target_layout.reset();
  const auto shards = std::make_shared<ShardSet>(request.path, 0, 1, request.states, request.thirdparty);
  ExportJob job = plan_job(request, *shards, shards->listings());
  ModelSource model;
  std::vector<MergedTensor> tensors = std::move(job.outputs.files.front().tensors);
  const std::shared_ptr<const TensorSource> source =
      side_by_side ? with_recent_pieces(shards, shards->listings().size()) : shards;
  const bool is_whole = job.plan.name() == as_it_is;
  const bool is_unchanged = is_whole && job.views.front().empty() && tensors.size() == shards->tensors().size() &&
                            std::ranges::all_of(tensors, [&](const MergedTensor& tensor) {
                              return shards->tensors()[tensor.sources.front().index].name == tensor.name;
                            });
  model.tensors = is_unchanged ? source : merged_of(source, job, std::move(tensors));
  model.config = std::move(job.config);
  model.metadata = shards->metadata();
  model.carried = request.base_model.empty() ? shards->carried(carry) : extra_files_of(request.base_model, carry);
  model.carried_from = request.base_model.empty() ? request.path : request.base_model;
  model.notes = std::move(job.account.notes);
  if (!is_whole) model.plan = std::move(job.plan);
  model.layout = job.account.source_layout;
  model.set = shards->listings().front().set;
  return model;
}

std::pair<std::size_t, std::uint64_t> ShardJob::place_in_model(std::size_t tensor) const {
  if (!viewed) return {tensor, 0};
  const std::vector<merge::StridedBox>& boxes = viewed->viewed()[tensor].boxes;
  if (boxes.empty()) return {};
  const MergedTensor& part = cut->merged()[static_cast<std::size_t>(boxes.front().source)];
  const std::vector<merge::Run> runs = merge::rows_of(part.layout).runs;
  return {part.sources.front().index, runs.empty() ? 0 : runs.front().begin};
}

void ShardJob::turn_views(const ParallelLayout& layout) {
  std::vector<MergedTensor> parts;
  std::vector<ViewedTensor> views;
  for (OutputFile& shard : outputs.files) {
    std::vector<NamedSpec> mine;
    for (const MergedTensor& tensor : shard.tensors) mine.push_back({tensor.name, tensor.layout.target});
    std::vector<MergedTensor> fused;
    for (ViewedTensor& view : unview_rank(plan, layout, mine)) {
      for (merge::StridedBox& box : view.boxes) box.source += static_cast<int>(parts.size());
      fused.push_back({view.name,
                       merge::join(merge::First{}, std::span(&view.spec, 1)),
                       {{0, static_cast<std::uint32_t>(views.size())}}});
      views.push_back(std::move(view));
    }
    for (MergedTensor& tensor : shard.tensors) parts.push_back(std::move(tensor));
    shard.tensors = std::move(fused);
    make_room_for_checksums(shard);
  }
  cut = std::make_shared<const MergedTensors>(source, std::vector<RankSources>(1), std::move(parts), outputs.equal);
  source = viewed = std::make_shared<const ViewedTensors>(cut, std::move(views));
}

// Cuts a checkpoint: the same assembly as an export's, with one process that has the whole model.
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
  AssemblyPlan assembly = plan_assembly(job.outputs.files, job.outputs.equal, ranks, {1, Writers::all, window_bytes});
  order_steps(assembly.processes.front().steps, job, files_at_once);
  OutputDirectory output(out, {options.force, options.stale_after});
  const std::shared_ptr<Group> group = single_group();
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
  copy_extra_files(job.carried_from, output.partial(), job.carried.names, [&] { go_on(*group); });
  job.report.skipped = std::move(job.carried.skipped);
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
        ErrorKind::invalid_argument,
        fmt::format(
            "workspace {}: sharding: a different {} already exists. Pass --force to replace it, or another workspace",
            in_quotes(to), in_quotes(name)),
        {.path = target});
  }
}

// Writes a model's shards as the states of a job in a workspace.
//
//  1. Files other than weights are compared with those of the same names in the workspace.
//  2. Each rank's state is written under a temporary name, one rank after the other, and renamed when it is complete.
//     The job's number is new, and no step is common until all states exist, so no reader uses an incomplete set.
//  3. The other files are copied. If anything fails before that, the states that already have their names are removed.
void write_states(ShardJob& job, const std::string& path, const ShardOptions& options) {
  const std::string workspace = workspace::prepare_workspace(path).path;
  if (!options.force) check_carried_files(job.carried_from, workspace, job.carried.names);
  Group::Nonce nonce{};
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
                                                     .step = 1});
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
    copy_extra_files(job.carried_from, workspace, job.carried.names, [&] { progress.add(0); });
  } catch (...) {
    std::error_code error;
    for (const std::string& file : made) std::filesystem::remove(file, error);
    throw;
  }
  job.report.skipped = std::move(job.carried.skipped);
}

}  // namespace

ShardReport shard_model(const std::string& model_dir, const std::string& out, const ParallelLayout& layout,
                        const std::string& plan_name, const ShardOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  if (!options.dry_run) check_not_source(model_dir, out);
  if (!options.dry_run && !options.base_model.empty()) check_not_source(options.base_model, out);
  if (!options.to_workspace) {
    if (options.zstd_level)
      throw Error(ErrorKind::invalid_argument,
                  "--compress: safetensors files cannot be compressed. Write to a workspace, whose states can");
    if (!options.dry_run) check_output(out, {options.force, {}});
  }
  const Request request{.path = model_dir,
                        .plan = plan_name,
                        .source_layout = options.source_layout,
                        .target_layout = layout,
                        .to_plan = options.to_plan,
                        .base_model = options.base_model,
                        .states = {{}, options.step, options.job_id},
                        .thirdparty = {options.key, options.file_pattern},
                        .select = options.select,
                        .exclude = options.exclude};
  if (options.to_plan.empty() && contents_of(model_dir, request.thirdparty).has_ranks())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} has the tensors of {} ranks and is not a model. Reshard it with muster export {} "
                            "--plan {} --to {} --out DIR",
                            in_quotes(model_dir), count_shards(model_dir), model_dir, plan_name, to_string(layout)),
                {.path = model_dir});
  ShardJob job(request, options.extra_files, !options.to_workspace);
  if (options.to_workspace && !options.dry_run) write_states(job, out, options);
  if (!options.to_workspace && !options.dry_run) write_files(job, out, layout, options);
  job.report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return std::move(job.report);
}

int count_shards(const std::string& shards_dir, const std::string& job, const std::string& shards) {
  const PathContents contents = contents_of(shards_dir, {{}, shards});
  if (contents.kind == PathContents::Kind::workspace)
    return workspace::choose_states(shards_dir, {.job = job}).world_size;
  if (contents.kind == PathContents::Kind::foreign) return std::max(contents.foreign->ranks, 1);
  return contents.kind == PathContents::Kind::model ? 1 : count_shard_files(shards_dir);
}

}  // namespace muster

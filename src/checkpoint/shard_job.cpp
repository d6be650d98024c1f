// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shard_job.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/plan_views.hpp"
#include "src/checkpoint/recent_pieces.hpp"
#include "src/checkpoint/shard_set.hpp"

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
  if (request.to_plan.empty() && !contents_of(request.path, request.foreign).has_ranks()) {
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
  const ParallelLayout& layout = *request.to;
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
  request.to.reset();
  const auto shards = std::make_shared<ShardSet>(request.path, 0, 1, request.states, request.foreign);
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
  model.carried = request.base.empty() ? shards->carried(carry) : carried_files(request.base, carry);
  model.carried_from = request.base.empty() ? request.path : request.base;
  model.notes = std::move(job.account.notes);
  if (!is_whole) model.plan = std::move(job.plan);
  model.set = shards->listings().front().set;
  return model;
}

std::pair<std::size_t, std::uint64_t> ShardJob::place_in_model(std::size_t tensor) const {
  if (!viewed) return {tensor, 0};
  const std::vector<merge::Box>& boxes = viewed->viewed()[tensor].boxes;
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
      for (merge::Box& box : view.boxes) box.source += static_cast<int>(parts.size());
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

}  // namespace muster

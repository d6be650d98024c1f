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

/// Throws if the model has names that ranks have, before the plan's views.
void check_names(const MergePlan& plan, std::span<const NamedSpec> model) {
  for (const NamedSpec& tensor : model)
    if (std::ranges::any_of(plan.views(), [&](const ViewRule& view) { return view.pattern.matches(tensor.name); }) &&
        !plan.origin(tensor.name))
      throw Error(
          ErrorKind::argument,
          fmt::format("the tensor {} has a name as ranks of the plan {} have it: that plan reads the checkpoint "
                      "then, and --to-plan (\"to_plan\") says by which it is cut",
                      in_quotes(tensor.name), in_quotes(plan.name())));
}

/// Each row of a tensor may have a part in each of so many `files`.
std::shared_ptr<const TensorSource> with_recent_pieces(std::shared_ptr<const TensorSource> source, std::size_t files) {
  // Twice what the windows of all ranks hold, and in each file one where that begins and one where it ends.
  return std::make_shared<RecentPieces>(std::move(source), 2 * shard_window_bytes / checked_piece_bytes + 2 * files);
}

}  // namespace

ShardJob::ShardJob(ModelSource from, const std::string& plan_name, const ParallelLayout& layout)
    : plan(cutting_plan(from, plan_name)),
      source(from.tensors),
      model(std::move(from.tensors)),
      set(std::move(from.set)),
      carried(std::move(from.carried)),
      carried_from(std::move(from.carried_from)) {
  report.notes = std::move(from.notes);
  std::vector<NamedSpec> tensors;
  for (const TensorEntry& entry : source->tensors()) {
    tensors.push_back({entry.name, {entry.dtype, entry.shape}});
    ++report.tensors;
    report.bytes += entry.bytes;
  }
  check_names(plan, tensors);
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

ModelSource open_model(const std::string& path, const std::string& plan, const ParallelLayout& layout,
                       const ShardOptions& options, bool side_by_side) {
  ModelSource model;
  model.carried_from = options.base.empty() ? path : options.base;
  model.config = config_around(path, options.base);
  const foreign::Choice choice{options.at, {}};
  if (const Contents contents = contents_of(path, choice); contents.has_ranks())
    throw Error(
        ErrorKind::argument,
        fmt::format("{} has the tensors of several ranks and is not a model: muster export {} --plan {} --ranks "
                    "{} --out DIR cuts them anew",
                    in_quotes(path), path, plan, to_string(layout)),
        {.path = path});
  const auto shards = std::make_shared<ShardSet>(path, 0, 1, workspace::StateChoice(), choice);
  model.metadata = shards->metadata();
  model.notes = shards->notes();
  model.carried = options.base.empty() ? shards->carried(options.carry) : carried_files(options.base, options.carry);
  model.tensors = shards;
  if (side_by_side) model.tensors = with_recent_pieces(std::move(model.tensors), 1);
  return model;
}

std::unique_ptr<MergedTensors> merged_of(std::shared_ptr<const TensorSource> shards, ExportJob& job,
                                         std::vector<MergedTensor> tensors) {
  std::vector<std::size_t> counts;
  for (const RankTensors& rank : job.ranks) counts.push_back(rank.tensors.size());
  if (has_views(job.plan))
    shards = std::make_shared<ViewedTensors>(shards, std::move(views_by_process(job.views, job.counts, 1).front()));
  return std::make_unique<MergedTensors>(std::move(shards), sources_by_rank(counts, 1), std::move(tensors),
                                         std::move(job.outputs.equal));
}

ModelSource merge_model(const std::string& path, const std::string& plan, const ExportOptions& options,
                        bool side_by_side) {
  const auto shards =
      std::make_shared<ShardSet>(path, 0, 1, workspace::StateChoice(), foreign::Choice{options.at, options.shards});
  ExportJob job = plan_job(path, plan, shards->listings(), shards->metadata(), options);
  ModelSource model;
  std::vector<MergedTensor> tensors;
  for (OutputFile& file : job.outputs.files)
    for (MergedTensor& tensor : file.tensors) tensors.push_back(std::move(tensor));
  model.tensors =
      merged_of(side_by_side ? with_recent_pieces(shards, shards->listings().size()) : shards, job, std::move(tensors));
  model.config = config_around(path, options.base);
  model.metadata = shards->metadata();
  model.carried = options.base.empty() ? shards->carried(options.carry) : carried_files(options.base, options.carry);
  model.carried_from = options.base.empty() ? path : options.base;
  model.notes = std::move(job.account.notes);
  model.plan = std::move(job.plan);
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

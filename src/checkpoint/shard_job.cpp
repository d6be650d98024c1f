// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shard_job.hpp"

#include <fmt/core.h>

#include <span>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/plan_views.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/core/quoted.hpp"

namespace muster {

ShardJob::ShardJob(const std::string& model_dir, const std::string& plan_name, const ParallelLayout& layout,
                   const ShardOptions& options)
    : config(read_model_config(model_dir)), plan(MergePlan::load(plan_name, config ? &*config : nullptr)) {
  Metadata metadata;
  if (const auto found = foreign::find_checkpoint(model_dir, {options.at, {}}))
    open_foreign(*found, plan_name, layout, options);
  else
    open_model(model_dir, options, metadata);
  model = source;
  std::vector<NamedSpec> tensors;
  for (const TensorEntry& entry : source->tensors()) {
    tensors.push_back({entry.name, {entry.dtype, entry.shape}});
    ++report.tensors;
    report.bytes += entry.bytes;
  }
  check_against_config(plan, tensors);
  const Arrangement arrangement = arrange_model(plan, tensors);
  outputs = shard_outputs(arrangement, plan, layout, metadata);
  for (const OutputFile& file : outputs.files)
    for (const MergedTensor& tensor : file.tensors)
      report.bytes_written += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
  report.notes.insert(report.notes.end(), arrangement.notes.begin(), arrangement.notes.end());
  report.notes.insert(report.notes.end(), outputs.notes.begin(), outputs.notes.end());
  if (!plan.views().empty() || !plan.at().empty()) turn_views(layout);
}

void ShardJob::open_model(const std::string& model_dir, const ShardOptions& options, Metadata& metadata) {
  const ModelDir model = ModelDir::open(model_dir);
  metadata = model.metadata();
  const auto files = std::make_shared<FileTensors>();
  for (const SafetensorsFile& file : model.files()) files->add(file);
  source = files;
  carried = carried_files(model_dir, options.carry);
}

void ShardJob::open_foreign(const foreign::Found& found, const std::string& plan_name, const ParallelLayout& layout,
                            const ShardOptions& options) {
  if (found.ranks != 0)
    throw Error(
        ErrorKind::argument,
        fmt::format("{} has the tensors of {} ranks: muster export {} --plan {} --ranks {} --out DIR cuts them anew",
                    in_quotes(found.path), found.ranks, found.path, plan_name, to_string(layout)),
        {.path = found.path});
  const auto shards =
      std::make_shared<ShardSet>(found.path, 0, 1, workspace::StateChoice(), foreign::Choice{options.at, {}});
  source = shards;
  carried = shards->carried(options.carry);
  report.notes = shards->notes();
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
    shard.metadata[std::string(piece_checksums_key)] = piece_checksums_text(no_piece_checksums(shard.tensors));
  }
  cut = std::make_shared<const MergedTensors>(source, std::vector<RankSources>(1), std::move(parts), outputs.equal);
  source = viewed = std::make_shared<const ViewedTensors>(cut, std::move(views));
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shard_job.hpp"

#include <span>
#include <utility>
#include <vector>

#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/plan_views.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/viewed_tensors.hpp"

namespace muster {

ShardJob::ShardJob(const std::string& model_dir, const std::string& plan_name, const ParallelLayout& layout)
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
  for (const OutputFile& file : outputs.files)
    for (const MergedTensor& tensor : file.tensors)
      report.bytes_written += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
  report.notes = arrangement.notes;
  report.notes.insert(report.notes.end(), outputs.notes.begin(), outputs.notes.end());
  const auto files = std::make_shared<FileTensors>();
  for (const SafetensorsFile& file : model.files()) files->add(file);
  source = files;
  if (!plan.views().empty() || !plan.at().empty()) turn_views(layout);
}

void ShardJob::turn_views(const ParallelLayout& layout) {
  std::vector<MergedTensor> cut;
  std::vector<ViewedTensor> views;
  for (OutputFile& shard : outputs.files) {
    std::vector<NamedSpec> mine;
    for (const MergedTensor& tensor : shard.tensors) mine.push_back({tensor.name, tensor.layout.target});
    std::vector<MergedTensor> fused;
    for (ViewedTensor& view : unview_rank(plan, layout, mine)) {
      for (merge::Box& box : view.boxes) box.source += static_cast<int>(cut.size());
      fused.push_back({view.name,
                       merge::join(merge::First{}, std::span(&view.spec, 1)),
                       {{0, static_cast<std::uint32_t>(views.size())}}});
      views.push_back(std::move(view));
    }
    for (MergedTensor& tensor : shard.tensors) cut.push_back(std::move(tensor));
    shard.tensors = std::move(fused);
    shard.metadata[std::string(piece_checksums_key)] = piece_checksums_text(no_piece_checksums(shard.tensors));
  }
  source = std::make_shared<ViewedTensors>(
      std::make_shared<const MergedTensors>(source, std::vector<RankSources>(1), std::move(cut), outputs.equal),
      std::move(views));
}

}  // namespace muster

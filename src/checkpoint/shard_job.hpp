// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model, and what each rank gets of it by a plan read backwards: for files, states, and ranks that load theirs.

#include <memory>
#include <optional>
#include <string>

#include "muster/config.hpp"
#include "muster/export.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/export_job.hpp"
#include "src/checkpoint/foreign/checkpoint.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/checkpoint/viewed_tensors.hpp"

namespace muster {

struct ShardJob {
  /// Throws as shard_model.
  ShardJob(const std::string& model_dir, const std::string& plan_name, const ParallelLayout& layout,
           const ShardOptions& options);

  std::optional<Config> config;
  MergePlan plan;
  ExportOutputs outputs;                       ///< a file a rank
  std::shared_ptr<const TensorSource> source;  ///< what they are made of, as the only process's
  std::shared_ptr<const TensorSource> model;   ///< the model's own tensors
  /// Of a plan with views: the source, and parts of the model that it is made of; else null.
  std::shared_ptr<const ViewedTensors> viewed;
  std::shared_ptr<const MergedTensors> cut;
  CarriedFiles carried;
  ShardReport report;

 private:
  void open_model(const std::string& model_dir, const ShardOptions& options, Metadata& metadata);
  void open_foreign(const foreign::Found& found, const std::string& plan_name, const ParallelLayout& layout,
                    const ShardOptions& options);
  /// Ranks have what the plan's views are of: the parts that the rules cut are tensors of their own, put together as
  /// they are read.
  void turn_views(const ParallelLayout& layout);
};

}  // namespace muster

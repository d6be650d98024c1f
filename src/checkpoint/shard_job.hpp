// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model, and what each rank gets of it by a plan read backwards: for files, states, and ranks that load theirs.

#include <memory>
#include <optional>
#include <string>
#include <utility>

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

/// What is cut, and what stands around it.
struct ModelSource {
  std::shared_ptr<const TensorSource> tensors = {};
  std::optional<Config> config = {};
  Metadata metadata = {};
  CarriedFiles carried = {};
  std::string carried_from = {};  ///< the directory that they are in
  std::vector<std::string> notes = {};
  std::optional<MergePlan> plan = {};  ///< that it was put together by; none if it was whole
  std::string set = {};                ///< of a workspace: as ShardListing's
};

/// Tensors of a job's outputs, put together as they are read. `shards`: all of them, of this process. Takes the sets of
/// equal sources out of the job.
std::unique_ptr<MergedTensors> merged_of(std::shared_ptr<const TensorSource> shards, ExportJob& job,
                                         std::vector<MergedTensor> tensors);

/// The model that a request without `to` makes, put together as it is read. `carry`: as ExportOptions'. Throws as
/// export_model. `side_by_side`: several ranks' parts of a tensor are read at about the same time.
ModelSource open_model(Request request, const std::string& carry = {}, bool side_by_side = false);

struct ShardJob {
  /// The request's model, cut for the layout `to` by `to_plan`. Without one, `plan` cuts what is whole already, and the
  /// tensors of ranks are cut by the plan that has put them together, but by "auto" if that has views. `carry` and
  /// `side_by_side`: as open_model's. Throws as shard_model.
  explicit ShardJob(const Request& request, const std::string& carry = {}, bool side_by_side = false);

  MergePlan plan;
  ExportOutputs outputs;                       ///< a file a rank
  std::shared_ptr<const TensorSource> source;  ///< what they are made of, as the only process's
  std::shared_ptr<const TensorSource> model;   ///< the model's own tensors
  std::string set;                             ///< as ModelSource's
  /// Of a plan with views: the source, and parts of the model that it is made of; else null.
  std::shared_ptr<const ViewedTensors> viewed;
  std::shared_ptr<const MergedTensors> cut;
  CarriedFiles carried;
  std::string carried_from;
  ShardReport report;

  /// Where what the source has as this tensor begins in the model: a tensor of it, and the byte.
  [[nodiscard]] std::pair<std::size_t, std::uint64_t> place_in_model(std::size_t tensor) const;

 private:
  using Opened = std::pair<ModelSource, Request>;
  explicit ShardJob(Opened opened) : ShardJob(std::move(opened.first), opened.second) {}
  ShardJob(ModelSource from, const Request& request);
  static Opened opened(Request request, const std::string& carry, bool side_by_side);
  /// Ranks have what the plan's views are of: the parts that the rules cut are tensors of their own, put together as
  /// they are read.
  void turn_views(const ParallelLayout& layout);
};

}  // namespace muster

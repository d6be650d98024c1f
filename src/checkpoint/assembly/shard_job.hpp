// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model and the parts of it that each rank gets by a plan in reverse: for files, states, and ranks that load their
// part.

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "muster/config.hpp"
#include "muster/export.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/viewed_tensors.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"

namespace muster {

/// The model to cut, and its other files.
struct ModelSource {
  std::shared_ptr<const TensorSource> tensors = {};
  std::optional<Config> config = {};
  Metadata metadata = {};
  ExtraFiles carried = {};
  std::string carried_from = {};  ///< the directory of the tensors
  std::vector<std::string> notes = {};
  std::optional<MergePlan> plan = {};  ///< the plan that merged it; nullopt if it was whole
  ParallelLayout layout = {};          ///< of the ranks that had it
  std::string set = {};                ///< workspace only: as ShardListing::set
};

/// Assembles the tensors of a job's outputs while they are read. `shards` has all shards, in this process. Moves the
/// sets of equal sources out of the job.
std::unique_ptr<MergedTensors> merged_of(std::shared_ptr<const TensorSource> shards, ExportJob& job,
                                         std::vector<MergedTensor> tensors);

/// Opens the model that a request without `target_layout` produces; it is assembled while it is read. `carry` is
/// ExportOptions::extra_files. `side_by_side`: several ranks' parts of a tensor are read at about the same time. Throws
/// as export_model.
ModelSource open_model(Request request, const std::string& carry = {}, bool side_by_side = false);

struct ShardJob {
  /// Cuts the request's model for its `target_layout` by `to_plan`. Without `to_plan`, a complete model is cut by
  /// `plan`. A merged model is then cut by the plan that merged it, or by "auto" if that plan has views. `carry` and
  /// `side_by_side` are as in open_model. Throws as shard_model.
  explicit ShardJob(const Request& request, const std::string& carry = {}, bool side_by_side = false);

  MergePlan plan;
  ExportOutputs outputs;                       ///< one file per rank
  std::shared_ptr<const TensorSource> source;  ///< the sources of the outputs, which all belong to this process
  std::shared_ptr<const TensorSource> model;   ///< the model's own tensors
  std::string set;                             ///< as ModelSource::set
  /// Plans with views only, otherwise null: the source, and the parts of the model from which it is made.
  std::shared_ptr<const ViewedTensors> viewed;
  std::shared_ptr<const MergedTensors> cut;
  ExtraFiles carried;
  std::string carried_from;
  ShardReport report;

  /// Returns the position in the model of a tensor of the source: a tensor of the model, and the byte.
  [[nodiscard]] std::pair<std::size_t, std::uint64_t> place_in_model(std::size_t tensor) const;

 private:
  using Opened = std::pair<ModelSource, Request>;
  explicit ShardJob(Opened opened) : ShardJob(std::move(opened.first), opened.second) {}
  ShardJob(ModelSource from, const Request& request);
  static Opened opened(Request request, const std::string& carry, bool side_by_side);
  /// Applies the plan's views in reverse, which gives the tensors that ranks have. The parts that the rules cut become
  /// separate tensors, which are assembled while they are read.
  void turn_views(const ParallelLayout& layout);
};

}  // namespace muster

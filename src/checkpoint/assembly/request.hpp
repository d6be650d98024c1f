// SPDX-License-Identifier: Apache-2.0
#pragma once
// The request that shard, export, load_shard and all inspecting commands share: the source of the tensors, how they are
// distributed over ranks, and the requested result.

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "muster/export.hpp"
#include "muster/parallel_layout.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/workspace/survey.hpp"

namespace muster {

struct Request {
  std::string path = {};  ///< a model, shards, a workspace or a third-party checkpoint
  std::string plan = {};  ///< reads the source; empty: as the source names it, or none if it is self-describing
  std::optional<ParallelLayout> source_layout = {};  ///< the layout of the source, if its files do not record it
  std::optional<ParallelLayout> target_layout = {};  ///< the layout of the resulting shards; empty: one checkpoint
  std::string to_plan = {};                          ///< splits the shards; empty: as in ExportOptions::to_plan
  std::string base_model = {};                       ///< a model's directory, as in ExportOptions
  workspace::StateChoice states = {};                ///< selects states of a workspace
  thirdparty::Choice thirdparty = {};                ///< for a third-party checkpoint
  std::string select = {};
  std::string exclude = {};
  std::optional<DType> dtype = {};
  bool cast_all = false;
  std::uint64_t max_shard_size = UINT64_MAX;
  std::map<std::string, std::string> files = {};  ///< as in ExportOptions
  bool check_replicas = true;                     ///< as in ExportOptions
  bool by_boxes = false;     ///< the tensors of ranks are boxes of those of the result; there is no plan
  bool is_balanced = false;  ///< of replicas, those of the rank with the least bytes are used, else of the first rank
  /// True for commands that only inspect: tensors are neither compared with those of the base nor left out.
  bool looks_only = false;
  /// True if the model is read only to be split by `to_plan`: ranks keep a tied head, and config.json does not change.
  bool is_cut = false;
  /// True for a version of weights: the names may differ from those of the base, and a tied head that the base has
  /// remains.
  bool is_version = false;
  /// True for one unit of a model: nothing is checked or derived that concerns the whole model.
  bool is_unit = false;
};

}  // namespace muster

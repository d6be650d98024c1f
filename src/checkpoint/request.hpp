// SPDX-License-Identifier: Apache-2.0
#pragma once
// One request for shard, export, load_shard and every command that looks into checkpoints: where the tensors are, how
// ranks share them, and what becomes of them.

#include <cstdint>
#include <optional>
#include <string>

#include "muster/export.hpp"
#include "muster/parallel_layout.hpp"
#include "src/checkpoint/foreign/checkpoint.hpp"
#include "src/workspace/survey.hpp"

namespace muster {

struct Request {
  std::string path = {};                    ///< a model, shards, a workspace or a checkpoint of another program
  std::string plan = {};                    ///< reads it; empty: the plan that it names, or as it is if it is whole
  std::optional<ParallelLayout> from = {};  ///< the layout of ranks that do not name theirs
  std::optional<ParallelLayout> to = {};    ///< shards of this layout are made, not one checkpoint
  std::string to_plan = {};                 ///< cuts them; empty: as ExportOptions::to_plan
  std::string base = {};                    ///< a model's directory, as in ExportOptions
  workspace::StateChoice states = {};       ///< of a workspace
  foreign::Choice foreign = {};             ///< of a checkpoint of another program
  std::string select = {};
  std::string exclude = {};
  std::optional<DType> dtype = {};
  bool cast_all = false;
  std::uint64_t max_shard_size = UINT64_MAX;
  /// Nothing is made of it: tensors are neither compared with the base's nor left out.
  bool looks_only = false;
  /// The model is only read in order to be cut by `to_plan`: ranks keep a tied head, and config.json does not change.
  bool is_cut = false;
};

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The request that shard, export, load_shard and all inspecting commands share: the source of the tensors, how they are
// distributed over ranks, and the requested result.

#include <cstdint>
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
  std::optional<ParallelLayout> from = {};  ///< the layout of the source, if its files do not record it
  std::optional<ParallelLayout> to = {};    ///< the layout of the resulting shards; empty: one checkpoint
  std::string to_plan = {};                 ///< splits the shards; empty: as in ExportOptions::to_plan
  std::string base = {};                    ///< a model's directory, as in ExportOptions
  workspace::StateChoice states = {};       ///< selects states of a workspace
  thirdparty::Choice foreign = {};          ///< for a third-party checkpoint
  std::string select = {};
  std::string exclude = {};
  std::optional<DType> dtype = {};
  bool cast_all = false;
  std::uint64_t max_shard_size = UINT64_MAX;
  /// True for commands that only inspect: tensors are neither compared with those of the base nor left out.
  bool looks_only = false;
  /// True if the model is read only to be split by `to_plan`: ranks keep a tied head, and config.json does not change.
  bool is_cut = false;
};

}  // namespace muster

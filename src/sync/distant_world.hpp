// SPDX-License-Identifier: Apache-2.0
#pragma once
// How world() makes a group of ranks on several hosts without knowing what such a group is made of: the layer that can
// registers its way here.

#include <functional>
#include <memory>
#include <string>

#include "muster/sync_group.hpp"

namespace muster::sync {

struct DistantWorld {
  std::string directory;  ///< MUSTER_WORKSPACE
  std::string key;
  int rank = 0;
  int size = 1;
};
using DistantWorldMaker = std::function<std::shared_ptr<SyncGroup>(const DistantWorld&)>;

/// Called when the library is loaded, before world().
void set_distant_world_maker(DistantWorldMaker maker);

}  // namespace muster::sync

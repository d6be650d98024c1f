// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/sync_group.hpp"

namespace muster::rendezvous {

/// The abstract socket at which the ranks of local groups with this key meet.
std::string local_name(const std::string& key);

/// muster::local_group(), for ranks that meet as a part of something larger: `watch` is called while they wait, and may
/// throw to end that.
std::shared_ptr<SyncGroup> join_local_group(const LocalGroupOptions& options, const std::function<void()>& watch);

}  // namespace muster::rendezvous

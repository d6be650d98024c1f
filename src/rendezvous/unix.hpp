// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/sync_group.hpp"

namespace muster::rendezvous {

/// Returns the name of the abstract socket at which the ranks of a local group with this key meet.
std::string local_name(const std::string& key);

/// Does the same as muster::local_group(), for callers that form a larger group. Calls `watch` repeatedly while it
/// waits; an exception from `watch` ends the rendezvous.
std::shared_ptr<SyncGroup> join_local_group(const LocalGroupOptions& options, const std::function<void()>& watch);

}  // namespace muster::rendezvous

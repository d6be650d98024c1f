// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a rank waits for its own device: the CPU asks, with the group's deadline, and hears of the group's failures
// meanwhile.

#include <functional>
#include <span>
#include <string>

#include "muster/sync_group.hpp"

namespace muster::cuda {

/// Returns when done() does; it is asked in turns with short sleeps. `what` is for messages: "cuda:0 to copy". `on`:
/// ranks without which it cannot come (of a collective between devices). Throws what done() throws; Error(timeout |
/// peer_lost | cancelled), which poison the group.
void wait_for_device(SyncGroup& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on = {});

}  // namespace muster::cuda

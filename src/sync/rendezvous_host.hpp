// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rank 0's side of a rendezvous: steps 2 to 4 of rendezvous.hpp.

#include <chrono>
#include <string>

#include "src/os/fd.hpp"
#include "src/sync/local_group.hpp"

namespace muster::sync {

/// `own_listener` is this rank's descriptor channel, at `address`. `timeout` is for messages.
Membership host_rendezvous(const std::string& key, int size, std::chrono::steady_clock::time_point deadline,
                           std::chrono::milliseconds timeout, os::Fd own_listener, const std::string& address);

}  // namespace muster::sync

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rank 0's side of a rendezvous: steps 2 to 4 of rendezvous.hpp.

#include <chrono>
#include <string>

#include "src/os/fd.hpp"
#include "src/sync/local_group.hpp"

namespace muster::sync {

/// `timeout` is for messages.
Membership host_rendezvous(const std::string& key, int size, std::chrono::steady_clock::time_point deadline,
                           std::chrono::milliseconds timeout);

}  // namespace muster::sync

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What all ranks of a transport do together, by its messages up and down a tree: no rank has to reach all others.

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "src/hosts/transport.hpp"

namespace muster::tcp {

/// As Transport::barrier.
hosts::Pending tree_barrier(hosts::Transport& transport);

/// As Transport::tell_all. Throws Error(timeout) that names the rank that did not come, Error(io).
std::vector<std::byte> tell_over_tree(hosts::Transport& transport, std::span<const std::byte> mine,
                                      std::chrono::milliseconds timeout);

}  // namespace muster::tcp

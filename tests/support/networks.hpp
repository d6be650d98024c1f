// SPDX-License-Identifier: Apache-2.0
#pragma once
// Hosts that are network namespaces: ranks of two of them cannot meet in shared memory, as on two machines.

#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::test {

/// A network namespace that nobody is in. Throws if none can be made.
os::Fd fresh_network();

/// Gives each a network card, "link0", by which it reaches all others, and network_address(), and its loopback.
void join_networks(const std::vector<os::Fd>& networks);
/// "10.78.0.1" of the first.
std::string network_address(int host);

/// This process is in it from now on.
void enter_network(const os::Fd& network);

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Hosts that are network namespaces. Ranks of two namespaces cannot form a group in shared memory, like ranks on two
// machines.

#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::test {

/// Makes a network namespace without processes. Throws if this fails.
os::Fd fresh_network();

/// Gives each namespace a network card "link0" with the address network_address(), through which it reaches all others,
/// and a loopback interface.
void join_networks(const std::vector<os::Fd>& networks);
/// Returns the address of a host: "10.78.0.1" for the first one.
std::string network_address(int host);

/// Moves this process into the namespace.
void enter_network(const os::Fd& network);

}  // namespace muster::test

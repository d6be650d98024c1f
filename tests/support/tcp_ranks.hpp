// SPDX-License-Identifier: Apache-2.0
#pragma once
// Forked ranks that form a group over TCP: MUSTER_TEST_GROUP=tcp on one host, tcp-N on N hosts, in blocks.

#include <memory>

#include "tests/support/forked_ranks.hpp"

namespace muster::test {

std::unique_ptr<GroupMaker> make_tcp_maker(int size, int hosts);

}  // namespace muster::test

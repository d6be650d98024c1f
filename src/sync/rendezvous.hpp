// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rendezvous: how the processes of one host that know a key become a group.
//
//  1. Every rank opens a pidfd of itself, and its region: the shared memory that the others may look at later.
//  2. Rank 0 listens on an abstract socket whose name is made of the key and the uid. The others connect to it, again
//     and again until the deadline, and say hello: version, rank, size, pid, host; pidfd and region go with it.
//  3. Rank 0 waits until all ranks have come, once each, of the same version and size. Else it tells everyone who has
//     come or still comes why not.
//  4. Rank 0 makes another region for what groups are made of, and the control block in it. It sends everyone a
//     welcome with that and the job's nonce, then cards with the pidfds and regions of all ranks, many in a packet. No
//     descriptor is passed between ranks after this.
//  5. All meet in a first barrier of the new group.
// A rank that dies before it has come is missed at the deadline; one that dies after it hangs up, and is named at once.

#include <chrono>
#include <string>

#include "muster/sync_group.hpp"
#include "src/sync/local_group.hpp"

namespace muster::sync {

/// The abstract socket that the ranks with this key meet at.
std::string meeting_name(const std::string& key);

/// Rank 0's side: steps 2 to 4. `timeout` is for messages.
Membership host_rendezvous(const std::string& key, int size, std::chrono::steady_clock::time_point deadline,
                           std::chrono::milliseconds timeout);

}  // namespace muster::sync

// SPDX-License-Identifier: Apache-2.0
#pragma once
// tcp_group(): ranks on several hosts without MPI, over TCP.

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "muster/sync_group.hpp"

namespace muster {

struct TcpGroupOptions {
  /// Where all ranks meet: "HOST:PORT" (or "tcp://HOST:PORT"), an address of rank 0's host and a free port there; or
  /// "file:///PATH", a file that rank 0 writes and removes, in a directory that all ranks see.
  std::string address;
  int rank = 0;
  int size = 1;
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the meeting, and the group's default after it
  /// What all ranks of the job know and no other job does; empty: MUSTER_JOB, else TORCHELASTIC_RUN_ID.
  std::string key = {};
  /// Rank 0: a socket that already listens at the port of `address`; the group takes it over. Other processes cannot
  /// take the port between its choice and this call then. Negative: rank 0 opens the address itself.
  int listener = -1;
};

/// A group of `size` processes on any hosts: ranks that share a host meet in shared memory there, and what they say to
/// each other does not go over TCP. Ranks listen at ports that the kernel chooses, and connect when they first have
/// something for each other. For networks whose hosts trust each other: connections of other jobs and of strangers are
/// dropped, but nothing is encrypted (docs/tcp.md).
///
/// A rank of another host that ends without leaving its groups is named at once, one that stands still at the deadline.
/// A group may go whenever it likes, on each rank at another time. At its end a process waits for the groups of the
/// other ranks to end: up to the group's timeout, 2 s after a failure.
///
/// Collective. Throws Error(argument) if the address is none, Error(io) if rank 0 cannot listen there, Error(timeout)
/// with the ranks that never came, or with what was found in place of rank 0, Error(version), Error(rank_mismatch) on
/// double ranks or different sizes: on all ranks who came.
std::shared_ptr<SyncGroup> tcp_group(const TcpGroupOptions& options);

}  // namespace muster

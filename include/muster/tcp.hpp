// SPDX-License-Identifier: Apache-2.0
#pragma once
// tcp_group(): ranks on several hosts, connected by TCP, without MPI.

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "muster/group.hpp"

namespace muster {

/// Options of tcp_group().
struct TcpGroupOptions {
  /// The rendezvous address. "HOST:PORT" (or "tcp://HOST:PORT") is an address of the host of rank 0 with a free port.
  /// "file:///PATH" is a file that rank 0 writes and deletes, in a directory that all ranks see.
  std::string address;
  /// The rank of this process.
  int rank = 0;
  /// The number of ranks.
  int size = 1;
  /// For the rendezvous; afterwards the default deadline of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Identifies the job: the same on all its ranks, and different from other jobs. Empty: MUSTER_JOB, else
  /// TORCHELASTIC_RUN_ID.
  std::string key = {};
  /// Rank 0 only: a socket that already listens at the port of `address`. The group takes ownership of it. With such a
  /// socket, no other process can take the port between its choice and this call. Negative: rank 0 listens at the
  /// address itself.
  int listener = -1;
};

/// Returns a group of `size` processes on any hosts. Collective. Ranks on the same host use shared memory, and their
/// data is not sent over TCP. Ranks listen at ports that the kernel chooses, and connect when they first exchange data.
/// Use it only in networks whose hosts trust each other: connections of other jobs and of strangers are closed, but the
/// data is not encrypted (docs/explanation/security.md).
///
/// If a rank of another host ends without leaving its groups, the other ranks report it at once. A stalled rank is
/// reported at the deadline. Each rank may destroy the group at a different time. At exit, a process waits for the
/// groups of the other ranks to end: up to the timeout of the group, or 2 s after a failure.
///
/// Throws Error(invalid_argument) if the address is malformed, and Error(io) if rank 0 cannot listen there. Throws
/// Error(timeout) with the ranks that did not arrive, or with a description of the process that was found in place of
/// rank 0. Throws Error(version), and Error(rank_mismatch) if two processes have the same rank or ranks disagree about
/// the size. All ranks that arrived throw these errors.
std::shared_ptr<Group> tcp_group(const TcpGroupOptions& options);

}  // namespace muster

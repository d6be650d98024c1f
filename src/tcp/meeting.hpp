// SPDX-License-Identifier: Apache-2.0
#pragma once
// The meeting: how ranks that know nothing but one address come to know all others'.
//
//  1. Rank 0 listens at the address. All others connect to it again and again until their deadline.
//  2. Each of them says who it is (Card): the job's token, its version, rank, size, and the port that it listens at.
//     Rank 0 answers at once that it has heard, or that this is another job; whoever says nothing of the kind is a
//     stranger, and dropped.
//  3. When all have come rank 0 answers all of them: the addresses that they came from, with their ports, and a new
//     token for the connections between them. What cannot be (versions, sizes or ranks that do not fit, ranks that are
//     missing at the deadline) it answers to all who came, and throws the same.
// A rank on rank 0's host may have come from an address that no other host knows (127.0.0.1): it is told to the others
// as "where rank 0 is", and each of them knows how it reached that.
//
// At file:///PATH rank 0 takes a free port, and writes its addresses and a number of this meeting into the file
// (published_address.hpp), which the others read before each try. The number is part of the token: what an earlier job
// has left there leads to nobody, or to somebody who says that this is another job, and the next try reads the file
// again. Rank 0 removes the file when the meeting is over.

#include <chrono>
#include <memory>
#include <string>

#include "src/tcp/tcp_transport.hpp"

namespace muster::tcp {

struct MeetingOptions {
  std::string address;  ///< "HOST:PORT", "tcp://HOST:PORT", "file:///PATH"
  int rank = 0;
  int size = 1;
  std::string key;  ///< tells the job from others
  std::chrono::milliseconds timeout{0};
};

/// Collective. Throws Error(argument) on an address that is none, Error(io) if rank 0 cannot listen there,
/// Error(timeout), Error(version), Error(rank_mismatch).
std::shared_ptr<TcpTransport> meet(const MeetingOptions& options);

}  // namespace muster::tcp

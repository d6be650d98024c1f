// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one rank sends to another in pieces, some of them under way at a time: straight from where they are, or from
// buffers that are used again.

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "src/mpi/buffer_pool.hpp"
#include "src/mpi/inflow.hpp"
#include "src/mpi/mpi_group.hpp"

namespace muster::mpi {

class Outflow {
 public:
  Outflow(MpiGroup& group, int to) : group_(group), to_(to) {}
  /// Takes buffers for `pieces` packed pieces of at most `bytes` each, fewer where they take turns: before the receiver
  /// is promised anything. Throws Error(no_space).
  void prepare(BufferPool& pool, std::size_t pieces, std::uint64_t bytes, std::uint64_t pool_limit);
  /// A prepared buffer that MPI does not read; waits for one. What it returns goes to send() as the keeper, too.
  std::shared_ptr<std::byte> buffer(const WaitOptions& wait);
  /// `bytes` stay until finish() has returned; `keeper` keeps them beyond that, where MPI never lets go.
  void send(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& wait);
  /// Until all has been sent. Throws, like all here, as SyncGroup::send; MPI may then still read what was under way.
  void finish(const WaitOptions& wait);

 private:
  void drain(std::size_t most, const WaitOptions& wait);

  MpiGroup& group_;
  int to_;
  std::vector<BufferPool::Buffer> buffers_;
  std::deque<Pending> under_way_;
  Eagerness eagerness_;
};

}  // namespace muster::mpi

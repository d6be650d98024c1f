// SPDX-License-Identifier: Apache-2.0
#pragma once
// A process manager for forked ranks: MPICH's ranks learn of each other through a descriptor on which they speak PMI-1,
// a protocol of lines. So tests fork, kill and look at MPI ranks as they do with all others, without mpiexec, which
// would kill the survivors.

#include <sys/types.h>

#include <vector>

namespace muster::test {

/// Serves `size` ranks from a process of its own, until all of them have hung up.
class PmiServer {
 public:
  explicit PmiServer(int size);
  ~PmiServer();
  PmiServer(const PmiServer&) = delete;
  PmiServer& operator=(const PmiServer&) = delete;

  /// In a forked rank, before MPI_Init: sets what MPICH looks for in the environment.
  void enter(int rank) const;

 private:
  std::vector<int> ends_;  // of the ranks
  pid_t pid_ = -1;
};

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counts the calls of each function, through Muster and through MPI. If MUSTER_PMPI_REPORT is set, MPI_Finalize writes
// a report to the file of that name, or to stderr if it is "-". It has one line per function, for the calls of rank 0.

#include <cstdint>

namespace muster::pmpi {

enum class Function : std::uint8_t {
  allreduce,
  bcast,
  reduce,
  allgather,
  allgatherv,
  gather,
  gatherv,
  scatter,
  scatterv,
  alltoall,
  alltoallv,
  reduce_scatter,
  reduce_scatter_block,
  barrier,
};
enum class Way : std::uint8_t { muster, mpi };

/// Returns a name like "MPI_Allreduce".
const char* name_of(Function function) noexcept;
/// May be called from any thread.
void count(Function function, Way way) noexcept;

}  // namespace muster::pmpi

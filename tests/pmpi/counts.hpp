// SPDX-License-Identifier: Apache-2.0
#pragma once
// How often each function was called, and what way the call went. MPI_Finalize tells it, if MUSTER_PMPI_REPORT is set:
// a line a function, for the calls of rank 0, in the file of that name, or on stderr if it is "-".

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

/// "MPI_Allreduce".
const char* name_of(Function function) noexcept;
/// Any thread.
void count(Function function, Way way) noexcept;

}  // namespace muster::pmpi

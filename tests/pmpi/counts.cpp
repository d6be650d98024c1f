// SPDX-License-Identifier: Apache-2.0
#include "tests/pmpi/counts.hpp"

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace muster::pmpi {
namespace {

constexpr std::array names{"MPI_Allreduce",
                           "MPI_Bcast",
                           "MPI_Reduce",
                           "MPI_Allgather",
                           "MPI_Allgatherv",
                           "MPI_Gather",
                           "MPI_Gatherv",
                           "MPI_Scatter",
                           "MPI_Scatterv",
                           "MPI_Alltoall",
                           "MPI_Alltoallv",
                           "MPI_Reduce_scatter",
                           "MPI_Reduce_scatter_block",
                           "MPI_Barrier"};

struct Count {
  std::atomic<std::uint64_t> through_muster;
  std::atomic<std::uint64_t> through_mpi;
};
std::array<Count, names.size()> counts;

void report(const char* path) noexcept {
  const bool is_stderr = std::string_view(path) == "-";
  std::FILE* const file = is_stderr ? stderr : std::fopen(path, "w");
  if (file == nullptr) {
    std::perror(path);
    return;
  }
  for (std::size_t at = 0; at < names.size(); ++at)
    std::fprintf(file, "%s: %llu through Muster, %llu through MPI\n", names[at],
                 static_cast<unsigned long long>(counts[at].through_muster.load()),
                 static_cast<unsigned long long>(counts[at].through_mpi.load()));
  if (!is_stderr) std::fclose(file);
}

}  // namespace

const char* name_of(Function function) noexcept {
  return names[static_cast<std::size_t>(function)];
}

void count(Function function, Way way) noexcept {
  Count& of_function = counts[static_cast<std::size_t>(function)];
  (way == Way::muster ? of_function.through_muster : of_function.through_mpi).fetch_add(1, std::memory_order_relaxed);
}

}  // namespace muster::pmpi

#pragma GCC visibility push(default)
extern "C" int MPI_Finalize() {
  int rank = -1;
  const char* const path = std::getenv("MUSTER_PMPI_REPORT");
  if (path != nullptr && PMPI_Comm_rank(MPI_COMM_WORLD, &rank) == MPI_SUCCESS && rank == 0) muster::pmpi::report(path);
  return PMPI_Finalize();
}
#pragma GCC visibility pop

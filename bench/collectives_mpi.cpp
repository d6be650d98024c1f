// SPDX-License-Identifier: Apache-2.0
// The same measurement for MPI, compiled by the compiler wrapper of any MPI: collectives_mpi OPERATION DTYPE
// MILLISECONDS BYTES... Types that MPI does not have (BF16) cannot be reduced.

#include <mpi.h>

#include <cstdlib>

#include "bench/collectives_loop.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc < 5) return 2;
  const std::string operation = argv[1];
  const double seconds = std::atof(argv[3]) * 1e-3;
  constexpr std::size_t most = (64U << 20) + 4096;
  char* const in = bench::buffer(most);
  char* const out = bench::buffer(most);
  const bench::Loop loop{rank, [] { MPI_Barrier(MPI_COMM_WORLD); },
                         [](double mine) {
                           double all = 0;
                           MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
                           return all;
                         }};
  loop.warm_up();
  for (int at = 4; at < argc; ++at) {
    const std::size_t bytes = std::strtoull(argv[at], nullptr, 10);
    const int count = static_cast<int>(bytes / 4);
    double took = 0;
    if (operation == "all_reduce") {
      took = loop.time(seconds, in, bytes, [&] { MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    } else if (operation == "all_gather") {
      took = loop.time(seconds, in, bytes / ranks, [&] {
        MPI_Allgather(in, count / ranks, MPI_FLOAT, out, count / ranks, MPI_FLOAT, MPI_COMM_WORLD);
      });
    } else if (operation == "reduce_scatter") {
      took = loop.time(seconds, in, bytes,
                       [&] { MPI_Reduce_scatter_block(in, out, count / ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    } else {
      int root = 0;
      took = loop.time(seconds, out, bytes, [&] { MPI_Bcast(out, count, MPI_FLOAT, root++ % ranks, MPI_COMM_WORLD); });
    }
    loop.report(operation, bytes, took);
  }
  MPI_Finalize();
}

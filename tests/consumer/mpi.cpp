// SPDX-License-Identifier: Apache-2.0
// An MPI program outside the project.
#include <muster/mpi.hpp>

#include <cstdio>

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  {
    const auto group = muster::mpi_group(MPI_COMM_WORLD);
    group->barrier();
    if (group->rank() == 0) std::printf("%d ranks\n", group->size());
  }
  MPI_Finalize();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// An MPI program that gathers its shards on rank 0 with one call on a communicator, on one host or on several.
//
//   mpiexec -n 4 build/examples/mpi_gather

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "muster/gather.hpp"
#include "muster/mpi.hpp"

namespace {

void gather() {
  const std::shared_ptr<muster::Group> group = muster::mpi_group(MPI_COMM_WORLD);

  const muster::Tensor shard = muster::Tensor::allocate(muster::DType::f32, {1024, 1024});
  std::ranges::fill(shard.mutable_values<float>(), static_cast<float>(group->rank()));

  const muster::GatheredTensors shards = muster::get_tensors_parallel(shard, muster::all_ranks, *group);
  for (const auto& [rank, tensor] : shards.present())  // empty on all ranks except the root
    std::printf("rank %d on %s: %zu bytes, all %.0f\n", rank, group->info(rank).host.c_str(), tensor.nbytes(),
                static_cast<double>(tensor.values<float>().front()));
  if (group->rank() == 0) std::printf("%s\n", shards.explain().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  try {
    gather();
  } catch (const std::exception& error) {
    // MPI_Finalize would wait for a dead rank. The other ranks get the same error, and exit too.
    std::fprintf(stderr, "mpi_gather: %s\n", error.what());
    return 2;
  }
  MPI_Finalize();
  return 0;
}

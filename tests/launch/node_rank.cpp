// SPDX-License-Identifier: Apache-2.0
// A rank of nodes.sh: gathers, reduces, and reports the results on rank 0. MUSTER_TEST_END names a rank, and how it
// ends.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "muster/gather.hpp"
#include "muster/process_group.hpp"

int main() {
  try {
    const auto group = muster::world();
    const char* const end = std::getenv("MUSTER_TEST_END");
    const int rank = group->rank();
    if (end != nullptr && std::atoi(end) == rank) {
      std::fprintf(stderr, "rank %d ends\n", rank);
      ::_exit(41);
    }
    muster::ProcessGroup ranks(*group);
    const muster::Tensor tensor = muster::Tensor::allocate(muster::DType::f32, {1000});
    for (float& value : tensor.mutable_values<float>()) value = static_cast<float>(rank);
    const auto gathered = muster::get_tensors_parallel(tensor.view(), muster::all_ranks, *group);
    double sum = 0;
    for (const auto& [from, shard] : gathered.present()) sum += static_cast<double>(shard.values<float>()[7]);
    ranks.all_reduce(tensor);
    // The test ends the launchers while the ranks wait.
    if (end != nullptr) {
      std::printf("%d\n", static_cast<int>(::getpid()));
      std::fflush(stdout);
      if (rank == 0) ::pause();
      ranks.barrier();
    }
    if (rank == 0) {
      std::set<std::string> hosts;
      for (int other = 0; other < group->size(); ++other) hosts.insert(group->info(other).host);
      std::printf("%d ranks on %d hosts: gathered %g, reduced %g, local %s of %s\n", group->size(),
                  static_cast<int>(hosts.size()), sum, static_cast<double>(tensor.values<float>()[7]),
                  std::getenv("LOCAL_RANK"), std::getenv("LOCAL_WORLD_SIZE"));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
  return 0;
}

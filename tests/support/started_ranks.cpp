// SPDX-License-Identifier: Apache-2.0
// MUSTER_TEST_GROUP=started: the ranks are those that a launcher of MPI has started (mpiexec -n 7 PROGRAM), on however
// many hosts. Each process is the whole test program and comes to every case; the first ranks of the world play it.

#include <chrono>
#include <cstdio>
#include <thread>

#include "muster/mpi.hpp"
#include "tests/support/forked_ranks.hpp"

namespace muster::test {
namespace {

/// As any program's: MPI is initialised, and finalised at exit, by Muster.
const SyncGroup& everybody() {
  static const std::shared_ptr<SyncGroup> the_world = world();
  return *the_world;
}

/// Those who have no part in a case wait for the next one here: MPI's own waits take all of a processor, which the
/// ranks that work need.
void wait_for_all() {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  for (int has_come = 0; has_come == 0;) {
    MPI_Test(&request, &has_come, MPI_STATUS_IGNORE);
    if (has_come == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

class StartedMaker final : public GroupMaker {
 public:
  explicit StartedMaker(int size) {
    const SyncGroup& all = everybody();
    wait_for_all();
    MPI_Comm_split(MPI_COMM_WORLD, all.rank() < size ? 0 : MPI_UNDEFINED, all.rank(), &comm_);
  }
  ~StartedMaker() override {
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  StartedMaker(const StartedMaker&) = delete;
  StartedMaker& operator=(const StartedMaker&) = delete;

  [[nodiscard]] std::shared_ptr<SyncGroup> join(int, std::chrono::milliseconds timeout) const override {
    return mpi_group(comm_, {.timeout = timeout});
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

std::unique_ptr<GroupMaker> make(int size) {
  return std::make_unique<StartedMaker>(size);
}

void give_up() {
  std::fflush(nullptr);
  // The launcher has to read it before it ends everything.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  MPI_Abort(MPI_COMM_WORLD, 1);
}

StartedRanks find_started() {
  const SyncGroup& all = everybody();
  return {.rank = all.rank(), .size = all.size(), .give_up = give_up};
}

const bool is_added = add_group_kind("started", make, find_started);

}  // namespace
}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
// MUSTER_TEST_GROUP=started: an MPI launcher has started the ranks (mpiexec -n 7 PROGRAM), on one or more hosts. Each
// process is the whole test program and reaches every case. The first ranks of the world play it.

#include <chrono>
#include <cstdio>
#include <thread>

#include "muster/mpi.hpp"
#include "tests/support/forked_ranks.hpp"

namespace muster::test {
namespace {

/// As in any program, Muster initialises MPI, and finalises it at exit.
const Group& everybody() {
  static const std::shared_ptr<Group> the_world = world();
  return *the_world;
}

/// Ranks that do not take part in a case wait here for the next one. The waits of MPI would use a whole CPU core, which
/// the working ranks need.
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
    const Group& all = everybody();
    wait_for_all();
    MPI_Comm_split(MPI_COMM_WORLD, all.rank() < size ? 0 : MPI_UNDEFINED, all.rank(), &comm_);
  }
  ~StartedMaker() override {
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  StartedMaker(const StartedMaker&) = delete;
  StartedMaker& operator=(const StartedMaker&) = delete;

  [[nodiscard]] std::shared_ptr<Group> join(int, std::chrono::milliseconds timeout) const override {
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
  // The launcher must read the output before it ends all ranks.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  MPI_Abort(MPI_COMM_WORLD, 1);
}

StartedRanks find_started() {
  const Group& all = everybody();
  return {.rank = all.rank(), .size = all.size(), .give_up = give_up};
}

const bool is_added = add_group_kind("started", make, find_started);

}  // namespace
}  // namespace muster::test

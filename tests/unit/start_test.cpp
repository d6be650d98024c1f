// SPDX-License-Identifier: Apache-2.0
// A process detects the launcher that started it.

#include "src/rendezvous/world.hpp"

#include <stdlib.h>

#include <filesystem>
#include <map>

#include "doctest/doctest.h"
#include "src/os/process.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::group;

namespace {

using Variables = std::map<std::string, std::string>;

Start start_of(const Variables& variables, bool has_sockets = true) {
  return find_start({.variable = [&](const char* name) -> std::optional<std::string> {
                       const auto found = variables.find(name);
                       return found == variables.end() ? std::nullopt : std::optional(found->second);
                     },
                     .is_socket = [&](int) { return has_sockets; }});
}

Variables operator+(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

const Variables mpiexec = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"PMI_FD", "9"}, {"MPI_LOCALRANKID", "1"}};
const Variables open_mpi = {{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "3"}, {"PMIX_RANK", "2"}};
const Variables muster_run = {{"RANK", "1"},          {"WORLD_SIZE", "2"},          {"LOCAL_WORLD_SIZE", "2"},
                              {"MUSTER_JOB", "abcd"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
const Variables torchrun = {{"RANK", "5"},         {"WORLD_SIZE", "8"},      {"LOCAL_WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "h1"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "17"}};
const Variables slurm_shell = {
    {"SLURM_JOB_ID", "42"}, {"SLURM_NTASKS", "8"}, {"SLURM_NPROCS", "8"}, {"SLURM_PROCID", "0"}};
const Variables slurm_step = slurm_shell + Variables{{"SLURM_STEP_ID", "0"},
                                                     {"SLURM_STEP_NUM_TASKS", "8"},
                                                     {"SLURM_STEP_NUM_NODES", "2"},
                                                     {"SLURM_STEP_NODELIST", "n[01-02,7],m"},
                                                     {"SLURM_PROCID", "3"}};

void check(const Start& start, StartedBy by, int rank, int size) {
  CHECK(start.by == by);
  CHECK(start.rank == rank);
  CHECK(start.size == size);
}

}  // namespace

TEST_CASE("a single launcher is detected") {
  check(start_of({}), StartedBy::alone, 0, 1);
  check(start_of(mpiexec), StartedBy::mpi, 1, 4);
  check(start_of(open_mpi), StartedBy::mpi, 2, 3);
  check(start_of({{"PMIX_RANK", "2"}}), StartedBy::mpi, 2, 0);
  check(start_of(muster_run), StartedBy::launcher, 1, 2);
  CHECK(start_of(muster_run).is_here);
  CHECK(start_of(muster_run).key == "job abcd");
  check(start_of(torchrun), StartedBy::launcher, 5, 8);
  CHECK(start_of(torchrun).is_apart);
  CHECK(start_of(torchrun).key == "torchrun h1 29500 17 ");
}

TEST_CASE("the variables show which MPI has started the ranks") {
  CHECK(start_of({}).manager == ProcessManager::none);
  CHECK(start_of(muster_run).manager == ProcessManager::none);
  CHECK(start_of(mpiexec).manager == ProcessManager::pmi);
  CHECK(start_of(mpiexec, false).manager == ProcessManager::none);
  CHECK(start_of(open_mpi).manager == ProcessManager::open_mpi);
  CHECK(start_of({{"PMIX_RANK", "2"}}).manager == ProcessManager::pmix);
}

TEST_CASE("ranks of several hosts have a port for the rendezvous, other than torchrun's own") {
  CHECK(start_of(muster_run).meeting.empty());
  CHECK(start_of(torchrun).meeting == "h1:29501");
  CHECK(start_of(torchrun + Variables{{"MUSTER_MASTER_PORT", "4000"}}).meeting == "h1:4000");
  CHECK(start_of(torchrun + Variables{{"MASTER_ADDR", "fe80::1"}}).meeting == "[fe80::1]:29501");
  for (const char* port : {"65535", "2147483647", "2147483648", "-1", "29500x"})
    CHECK_THROWS_AS(start_of(torchrun + Variables{{"MASTER_PORT", port}}), Error);
  // Started by hand: no variable has the number of ranks on this host.
  Variables by_hand = torchrun;
  by_hand.erase("LOCAL_WORLD_SIZE");
  CHECK(start_of(by_hand).meeting == "h1:29501");
  CHECK(!start_of(by_hand).is_apart);
  for (const char* here : {"localhost", "127.0.0.1", "::1"})
    CHECK(start_of(by_hand + Variables{{"MASTER_ADDR", here}}).meeting.empty());
  by_hand.erase("MASTER_ADDR");
  CHECK(start_of(by_hand).meeting.empty());
}

TEST_CASE("variables of a process manager that no longer listens are ignored") {
  check(start_of(mpiexec, false), StartedBy::alone, 0, 1);
  check(start_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}), StartedBy::alone, 0, 1);
  check(start_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"PMI_PORT", "h1:4000"}}, false), StartedBy::mpi, 1, 4);
  // torchrun closes its workers' descriptors.
  check(start_of(mpiexec + torchrun, false), StartedBy::launcher, 5, 8);
}

TEST_CASE("MUSTER_STANDALONE=1 is one process inside every job") {
  for (const Variables& job : {mpiexec, open_mpi, muster_run, torchrun, slurm_step, Variables{{"RANK", "0"}}}) {
    check(start_of(job + Variables{{"MUSTER_STANDALONE", "1"}}), StartedBy::alone, 0, 1);
    CHECK_THROWS_AS(start_of(job + Variables{{"MUSTER_STANDALONE", "yes"}}), Error);
  }
  check(start_of(muster_run + Variables{{"MUSTER_STANDALONE", "0"}}), StartedBy::launcher, 1, 2);
}

TEST_CASE("a renamed variable is refused with its new name") {
  CHECK(os::renamed_variables().size() == 4);
  // Former names are looked for once per process, so each has a process of its own, which runs the test case below.
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  for (const os::RenamedVariable& renamed : os::renamed_variables()) {
    const std::string now(renamed.now);
    CAPTURE(now);
    CHECK(os::environment(now.c_str()) == std::nullopt);
    const std::string command =
        std::string("env ") + renamed.before + "=1 MUSTER_TEST_READ=" + now + " '" + program +
        "' --no-skip --test-case='the variable of MUSTER_TEST_READ has a former name that is set' > /dev/null";
    CHECK(std::system(command.c_str()) == 0);
  }
}

TEST_CASE("the variable of MUSTER_TEST_READ has a former name that is set" * doctest::skip()) {
  const std::string now = os::environment("MUSTER_TEST_READ").value_or("");
  CHECK(test::has(test::words_of(ErrorKind::invalid_argument, [&] { (void)os::environment(now.c_str()); }),
                  " is not supported: set " + now));
  CHECK(os::environment("PATH"));
}

TEST_CASE("one process of MPI is one process") {
  const Variables one = {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"PMI_FD", "9"}};
  check(start_of(one), StartedBy::alone, 0, 1);
  check(start_of(one + torchrun), StartedBy::launcher, 5, 8);
}

TEST_CASE("variables of two launchers: the inner one, or an error") {
  // muster run removes MPI's variables from its ranks, so these were set later.
  check(start_of(muster_run + mpiexec), StartedBy::mpi, 1, 4);
  check(start_of(torchrun + open_mpi), StartedBy::launcher, 5, 8);
  check(start_of(mpiexec + Variables{{"RANK", "1"}, {"WORLD_SIZE", "4"}}), StartedBy::mpi, 1, 4);
  const std::string words = test::words_of(ErrorKind::invalid_argument, [] {
    start_of(mpiexec + Variables{{"RANK", "0"}, {"WORLD_SIZE", "2"}});
  });
  for (const char* part : {"RANK=0, WORLD_SIZE=2", "PMI_RANK=1, PMI_SIZE=4", "set_world()"})
    CHECK(test::has(words, part));
}

TEST_CASE("Slurm: the shell of a job is one process, a step's tasks are ranks") {
  check(start_of(slurm_shell), StartedBy::alone, 0, 1);
  check(start_of(slurm_step), StartedBy::slurm, 3, 8);
  CHECK(start_of(slurm_step).is_apart);
  CHECK(start_of(slurm_step).meeting == "n01:20042");
  CHECK(start_of(slurm_step + Variables{{"SLURM_STEP_NODELIST", "a,b[1-2]"}, {"MUSTER_MASTER_PORT", "7"}}).meeting ==
        "a:7");
  check(start_of(slurm_step + mpiexec), StartedBy::mpi, 1, 4);
  check(start_of(slurm_step + Variables{{"PMIX_RANK", "3"}}), StartedBy::mpi, 3, 8);
  check(start_of(slurm_step + torchrun), StartedBy::launcher, 5, 8);
  const Start here = start_of(slurm_step + Variables{{"SLURM_STEP_NUM_NODES", "1"}});
  CHECK(here.is_here);
  CHECK(here.key == "slurm 42 0 ");
  // mpiexec inside an allocation, with one process.
  check(start_of(slurm_step + Variables{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"PMI_FD", "9"}}), StartedBy::alone, 0,
        1);
}

TEST_CASE("invalid variables are refused") {
  for (const Variables& bad :
       {Variables{{"RANK", "0"}}, Variables{{"WORLD_SIZE", "2"}}, Variables{{"RANK", "2"}, {"WORLD_SIZE", "2"}},
        Variables{{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, Variables{{"RANK", "x"}, {"WORLD_SIZE", "2"}},
        Variables{{"PMI_RANK", "4"}, {"PMI_SIZE", "4"}, {"PMI_FD", "3"}}})
    CHECK_THROWS_AS(start_of(bad), Error);
}

TEST_CASE("the variables that ranks of muster run do not inherit") {
  for (const char* name :
       {"PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "MUSTER_STANDALONE"})
    CHECK(is_own_variable(name));
  for (const char* name : {"PATH", "RANK", "SLURM_JOB_ID", "OMP_NUM_THREADS", "OMPI_MCA_btl", "MPIR_CVAR_NOLOCAL"})
    CHECK_FALSE(is_own_variable(name));
}

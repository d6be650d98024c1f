// SPDX-License-Identifier: Apache-2.0
// How ranks find each other, and which peers are rejected.

#include "src/rendezvous/unix.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "doctest/doctest.h"
#include "muster/compat/dist.hpp"
#include "muster/gather.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/process.hpp"
#include "src/os/socket.hpp"
#include "src/rendezvous/messages.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/sandbox.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

void set_variables(const std::vector<std::pair<const char*, std::string>>& variables) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "MUSTER_JOB"})
    ::unsetenv(name);
  for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
}

void refuse_world(ErrorKind kind, const std::vector<std::pair<const char*, std::string>>& variables) {
  set_variables(variables);
  set_world(nullptr);
  error_of(kind, {}, [] { (void)world(); });
}

}  // namespace

TEST_CASE("world() under torchrun's variables, whose port is never bound") {
  run_processes(3, [](int rank) {
    set_variables({{"RANK", std::to_string(rank)},
                   {"WORLD_SIZE", "3"},
                   {"LOCAL_WORLD_SIZE", "3"},
                   {"MASTER_ADDR", "127.0.0.1"},
                   {"MASTER_PORT", "1"},
                   {"TORCHELASTIC_RUN_ID", std::to_string(::getppid())}});
    const auto group = world();
    RANK_CHECK(group->size() == 3 && group->rank() == rank);
    RANK_CHECK(group == world());
    group->barrier();
  });
}

TEST_CASE("world() of one process, and invalid variables") {
  run_processes(1, [](int) {
    set_variables({});
    RANK_CHECK(world()->size() == 1);
    refuse_world(ErrorKind::argument, {{"RANK", "one"}, {"WORLD_SIZE", "2"}, {"MUSTER_JOB", "x"}});
    refuse_world(ErrorKind::argument, {{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MUSTER_JOB", "x"}});
    refuse_world(ErrorKind::argument, {{"RANK", "0"}});
    refuse_world(ErrorKind::argument, {{"RANK", "0"}, {"WORLD_SIZE", "2"}});
    refuse_world(ErrorKind::unsupported,
                 {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}, {"MUSTER_JOB", "x"}});
    set_variables({});
    const auto mine = single_group();
    set_world(mine);
    RANK_CHECK(world() == mine);
  });
}

TEST_CASE("an exchange and the watchdog use the same number for a rank, its own in a larger job") {
  const std::string key = unique_key();
  run_processes(2, {1}, [&](int rank) {
    const auto group = local_group({.key = key, .rank = rank, .size = 2, .timeout = 20s, .numbers = {40, 41}});
    const std::string named = "rank 41 (host " + group->info(1).host + ", pid " + std::to_string(group->info(1).pid);
    const auto is_named = [&](const std::function<void()>& call) {
      const Error error = error_of(call);
      if (error.rank() != 41 || !says(error, named)) throw RankFailure(error.what());
    };
    const Tensor mine = pattern(DType::u8, {5000}, 1);
    GatherOptions options;
    if (rank == 1) options.memory_budget = 1;
    is_named([&] { (void)get_tensors_parallel(mine, std::vector<int>{0, 1}, *group, options); });
    if (rank == 1) ::raise(SIGKILL);
    is_named([&] { group->barrier(); });
  });
}

TEST_CASE("the same key serves one group after another") {
  const std::string key = unique_key();
  run_processes(3, [&](int rank) {
    for (int i = 0; i < 10; ++i) local_group({.key = key, .rank = rank, .size = 3, .timeout = 10s})->barrier();
  });
}

TEST_CASE("a rank of another version is refused on all ranks, with both versions") {
  const std::string key = unique_key();
  run_processes(3, [&](int rank) {
    if (rank == 2) {
      rendezvous::Hello hello = rendezvous::own_hello(2, 3);
      hello.token = rendezvous::token_of(key);
      put_text(hello.version, "7.8.9");
      std::optional<os::Fd> socket;
      while (!(socket = os::connect_abstract(rendezvous::local_name(key)))) std::this_thread::sleep_for(1ms);
      const auto message = rendezvous::make_message(rendezvous::Word::hello, std::as_bytes(std::span(&hello, 1)));
      RANK_CHECK(os::send_some(*socket, message->bytes).bytes == message->bytes.size());
      pollfd entry{socket->get(), POLLIN, 0};
      os::poll_sockets({&entry, 1}, 5000ms);  // the cause of the failure arrives
      RANK_CHECK(entry.revents != 0);
      return;
    }
    error_of(ErrorKind::version, {"7.8.9"},
             [&] { (void)local_group({.key = key, .rank = rank, .size = 3, .timeout = 10s}); });
  });
}

TEST_CASE("a peer that is not a rank is rejected, and the group forms") {
  const std::string key = unique_key();
  run_processes(3, [&](int rank) {
    if (rank == 2) {
      std::optional<os::Fd> socket;
      while (!(socket = os::connect_abstract(rendezvous::local_name(key)))) std::this_thread::sleep_for(1ms);
      const char noise[] = "GET / HTTP/1.1";
      (void)os::send_some(*socket, std::as_bytes(std::span(noise)));
      std::this_thread::sleep_for(50ms);
    }
    local_group({.key = key, .rank = rank, .size = 3, .timeout = 10s})->barrier();
  });
}

TEST_CASE("a rank whose sandbox forbids pidfd_open is the cause that all ranks throw at once") {
  for (const int sandboxed : {0, 2}) {
    const std::string key = unique_key();
    run_processes(4, [&](int rank) {
      if (rank == sandboxed) forbid_pidfd_open();
      const auto begin = std::chrono::steady_clock::now();
      const Error error = error_of(ErrorKind::unsupported, {"pidfd_open", "cannot join"},
                                   [&] { (void)local_group({.key = key, .rank = rank, .size = 4, .timeout = 30s}); });
      RANK_CHECK(error.rank() == sandboxed);
      RANK_CHECK(std::chrono::steady_clock::now() - begin < 10s);
    });
  }
}

TEST_CASE("env:// uses the timeout of its call, world() keeps the default, and a failed world is created again") {
  const std::string key = unique_key();
  run_processes(2, [&](int rank) {
    set_variables(
        {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MUSTER_JOB", key}});
    const auto begin = std::chrono::steady_clock::now();
    if (rank == 0)
      error_of(ErrorKind::timeout, {"rank 1"}, [] { dist::init_process_group("shm", {.timeout = 500ms}); });
    else
      std::this_thread::sleep_for(2s);
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 10s);
    for (int turn = 0; turn < 3; ++turn) {
      dist::init_process_group("shm", {.timeout = 7s});
      SyncGroup& group = dist::process_group().group();
      RANK_CHECK(group.timeout() == 7s);
      RANK_CHECK(world()->timeout() == 600s);
      dist::barrier();
      // Ranks that continue with a rank that has failed need a new rendezvous.
      if (turn == 0) group.poison(Error(ErrorKind::cancelled, "the group has failed"));
      if (turn == 1) world()->poison(Error(ErrorKind::cancelled, "the world has failed"));
      if (turn < 2)
        error_of(ErrorKind::cancelled, {"has failed"}, [&] { turn == 0 ? group.barrier() : world()->barrier(); });
      dist::destroy_process_group();
      RANK_CHECK(turn == 1 || world()->timeout() == 600s);
    }
  });
}

TEST_CASE("set_world() does not wait for a rendezvous of another thread") {
  run_processes(1, [](int) {
    set_variables({{"RANK", "0"},
                   {"WORLD_SIZE", "2"},
                   {"LOCAL_WORLD_SIZE", "2"},
                   {"MUSTER_JOB", unique_key()},
                   {"MUSTER_TIMEOUT", "3"}});
    std::thread waiting([] { error_of(ErrorKind::timeout, {"rank 1"}, [] { (void)world(); }); });
    std::this_thread::sleep_for(300ms);
    const auto begin = std::chrono::steady_clock::now();
    set_world(single_group());
    const bool was_quick = std::chrono::steady_clock::now() - begin < 1s;
    waiting.join();
    ::unsetenv("MUSTER_TIMEOUT");
    RANK_CHECK(was_quick);
  });
}

TEST_CASE("another process that is rank 0 of the same key is an error, not a mixed group") {
  const std::string key = unique_key();
  run_processes(2, [&](int process) {
    if (process == 1) std::this_thread::sleep_for(200ms);
    const Error error = error_of([&] { (void)local_group({.key = key, .rank = 0, .size = 2, .timeout = 1s}); });
    RANK_CHECK(error.kind() == (process == 0 ? ErrorKind::timeout : ErrorKind::argument) ||
               error.kind() == ErrorKind::timeout);
  });
}

TEST_CASE("PID reuse is detected: a pidfd stays dead when its number lives again") {
  Ranks ranks(1, [](int) {
    int pipes[2];
    RANK_CHECK(::pipe(pipes) == 0);
    const pid_t first = ::fork();
    if (first == 0) {
      ::pause();
      ::_exit(0);
    }
    // The test does the same as a rank, but from outside: the kernel returns the same descriptor.
    const os::Fd pidfd(static_cast<int>(::syscall(434 /* pidfd_open */, first, 0)));
    RANK_CHECK(bool(pidfd) && !os::has_exited(pidfd));
    ::kill(first, SIGKILL);
    ::waitpid(first, nullptr, 0);
    pid_t second = -1;
    for (int attempt = 0; attempt < 50 && second != first; ++attempt) {
      std::ofstream last("/proc/sys/kernel/ns_last_pid");
      last << first - 1;
      last.close();
      if (!last) {
        say("skipped: the next process number cannot be chosen here");
        return;
      }
      second = ::fork();
      if (second == 0) {
        ::pause();
        ::_exit(0);
      }
      if (second != first) {
        ::kill(second, SIGKILL);
        ::waitpid(second, nullptr, 0);
      }
    }
    if (second != first) {
      say("skipped: another process was faster with the number");
      return;
    }
    RANK_CHECK(os::process_state(first) == os::ProcessState::running);
    RANK_CHECK(os::has_exited(pidfd));
    ::kill(second, SIGKILL);
    ::waitpid(second, nullptr, 0);
  });
  const std::vector<Ended> ended = ranks.wait();
  check_ended(ended);
  if (!ended[0].words.empty()) MESSAGE(ended[0].words);
}

// SPDX-License-Identifier: Apache-2.0
// One thread forks at random moments while other threads gather and stream. No call may block in the children.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "muster/async.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/log.hpp"
#include "muster/process_group.hpp"
#include "muster/shared_arena.hpp"
#include "src/base/fork_mutex.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int forks = 150;
// Under a sanitizer, another thread may hold a lock of the allocator at the fork. The child may then hang in `new`.
constexpr unsigned most_seconds = under_sanitizer ? 5 : 20;

/// The most recent results of the gathering threads. A child drops its copies.
struct Held {
  ForkMutex mutex;
  std::vector<std::shared_ptr<void>> results;
  template <class Result>
  void hold(Result result) {
    const std::lock_guard lock(mutex);
    results.push_back(std::make_shared<Result>(std::move(result)));
    if (results.size() > 4) results.erase(results.begin());
  }
  std::vector<std::shared_ptr<void>> taken() {
    const std::lock_guard lock(mutex);
    return std::exchange(results, {});
  }
};

/// Runs in the child: drops results, makes calls, and ends. Each call must return or throw.
[[noreturn]] void end_child(std::shared_ptr<Group> group, std::vector<std::shared_ptr<void>> results) {
  ::alarm(most_seconds);
  int status = 0;
  results.clear();
  log(LogLevel::debug, "a message");
  try {
    if (error_of([&] { group->barrier(); }).kind() != ErrorKind::unsupported) status = 2;
    if (error_of([&] { gather_and_check(*group); }).kind() != ErrorKind::unsupported) status = 3;
    if (error_of([&] { (void)get_tensors_async(pattern(DType::u8, {10}, 1), all_ranks, *group); }).kind() !=
        ErrorKind::unsupported)
      status = 4;
    group->abort(Error(ErrorKind::io, "a child's"));
    if (!group->error()) status = 5;
    // The child can use objects that it makes itself.
    SharedArena arena(1 << 16);
    (void)arena.allocate(DType::u8, {100});
    single_group()->barrier();
  } catch (const std::exception&) {
    status = 6;
  }
  group.reset();
  ::_exit(status);
}

void fork_often(const std::shared_ptr<Group>& group, Held& held, std::string& failure) {
  for (int turn = 0; turn < forks && failure.empty(); ++turn) {
    std::vector<std::shared_ptr<void>> results = held.taken();
    const pid_t child = ::fork();
    if (child == 0) end_child(group, std::move(results));
    int status = 0;
    if (child < 0 || ::waitpid(child, &status, 0) != child) failure = "fork or waitpid";
    if (WIFSIGNALED(status) && !(under_sanitizer && WTERMSIG(status) == SIGALRM))
      failure = "child " + std::to_string(turn) + " hangs or crashes: signal " + std::to_string(WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
      failure = "child " + std::to_string(turn) + ": status " + std::to_string(WEXITSTATUS(status));
    std::this_thread::sleep_for(std::chrono::microseconds(137 * (turn % 23)));
  }
}

}  // namespace

TEST_CASE("a child that is forked at a random moment drops its results, its calls throw, and it ends") {
  const GroupOf group(2);
  Ranks ranks(2, [&](int rank) {
    const auto mine = group.join(rank, 60s);
    // The log level is debug, so that a fork may also happen while a thread holds the lock of the log.
    set_log_hook([](LogLevel, std::string_view) {}, LogLevel::debug);
    Held held;
    std::atomic<bool> is_over{false};
    std::string failure;
    std::thread forker([&] {
      if (rank == 0) fork_often(mine, held, failure);
      is_over = true;
    });
    const std::vector<int> all{0, 1};
    const Model model = [](int from, std::uint64_t layer) {
      return Config(pattern(DType::u8, {200'000}, seed_of(from, layer)));
    };
    std::uint8_t ends = 0;
    for (std::uint64_t turn = 0; ends == 0; ++turn) {
      auto work = get_tensors_async(pattern(DType::u8, {300'000}, turn), all, *mine);
      held.hold(get_tensors_parallel(pattern(DType::u8, {200'000}, turn), all, *mine));
      (void)stream_and_check(*mine, all, 3, model);
      held.hold(work.get());
      const std::uint8_t own = is_over ? 1 : 0;
      std::array<std::uint8_t, 2> both{};
      mine->all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(both)));
      ends = rank == 0 ? own : both[0];
    }
    forker.join();
    if (!failure.empty()) throw RankFailure(failure);
    mine->barrier();
  });
  check_ended(ranks.wait(200s));
}

TEST_CASE("in a forked child, a mutex that another thread held throws, and a free mutex works") {
  ForkMutex held;
  ForkMutex free;
  std::atomic<int> stage{0};
  std::thread holder([&] {
    const std::lock_guard lock(held);
    stage = 1;
    while (stage != 2) std::this_thread::yield();
  });
  while (stage != 1) std::this_thread::yield();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    bool is_right = !held.try_lock() && !held.lock_unless_abandoned();
    try {
      held.lock();
      is_right = false;
    } catch (const Error& error) {
      is_right = is_right && error.kind() == ErrorKind::unsupported;
    }
    const std::lock_guard lock(free);
    ::_exit(is_right ? 0 : 1);
  }
  stage = 2;
  holder.join();
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

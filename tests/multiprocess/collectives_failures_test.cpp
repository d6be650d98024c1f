// SPDX-License-Identifier: Apache-2.0
// Collectives whose ranks are killed, stopped or cancelled: before every call and at each step of it.
//
// MUSTER_TEST_POINTS: number of evenly spaced steps at which a rank is killed, and stopped, in each small call (2, 1).
// Calls of several chunks have a third as many. Copies byte by byte have too many steps, so the test sets
// GLIBC_TUNABLES.
// Without the variable, a rank ends at the first step over messages and under sanitizers, where calls also have too
// many steps.

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "doctest/doctest.h"
#include "muster/process_group.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/stepped_end.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int lost_rank = 2;

/// Steps through the call of the lost rank, on whichever thread it runs.
std::optional<SteppedEnd> stepped;
template <class Work>
void in_steps(const Work& work) {
  stepped ? stepped->run(work) : work();
}

struct Named {
  const char* name;
  void (*call)(ProcessGroup&, const Tensor&, const CollectiveOptions&);
  bool is_message = false;
  bool has_thread = false;
};
const Named calls[] = {
    {"barrier", [](ProcessGroup& g, const Tensor&, const CollectiveOptions& o) { g.barrier(o); }},
    {"all_reduce",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { g.all_reduce(t, ReduceOp::sum, o); }},
    {"reduce", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { g.reduce(t, 1, ReduceOp::sum, o); }},
    {"broadcast", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { g.broadcast(t, lost_rank, o); }},
    {"reduce_scatter", [](ProcessGroup& g, const Tensor& t,
                          const CollectiveOptions& o) { (void)g.reduce_scatter(t, 0, ReduceOp::sum, o); }},
    {"all_gather", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { (void)g.all_gather(t, 0, o); }},
    {"all_to_all", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { (void)g.all_to_all(t, o); }},
    {"all_gather_config",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { (void)g.all_gather_config(t, o); }},
    {"irecv",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) {
       std::vector<Work<void>> sends;
       for (int to = 0; to < g.size() && g.rank() == lost_rank; ++to)
         if (to != lost_rank) sends.push_back(g.isend(t, to, 0, o));
       if (g.rank() != lost_rank) (void)g.irecv(t, g.rank() == 0 ? any_rank : lost_rank, 0, o).get();
       for (auto& each : sends) each.get();
     },
     true},
    {"send",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) {
       const int next = (g.rank() + 1) % g.size();
       if (g.rank() == 0) g.send(t, next, 0, o);
       (void)g.recv(t, (g.rank() + g.size() - 1) % g.size(), 0, o);
       if (g.rank() != 0) g.send(t, next, 0, o);
     },
     true},
    {"all_reduce_shared", [](ProcessGroup& g, const Tensor& t,
                             const CollectiveOptions& o) { (void)g.all_reduce_shared(t, ReduceOp::sum, o); }},
    {"all_reduce",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) {
       g.start([&](ProcessGroup& own) { in_steps([&] { own.all_reduce(t, ReduceOp::sum, o); }); }).get();
     },
     false, true},
};

const bool over_shared_memory = std::getenv("MUSTER_TEST_GROUP") == nullptr;

/// Over messages all calls have the same few steps.
std::span<const Named> calls_here() {
  return over_shared_memory || std::getenv("MUSTER_TEST_POINTS") != nullptr ? std::span(calls)
                                                                            : std::span(calls).subspan(1, 2);
}

Tensor ones(std::int64_t count) {
  return Tensor::take(std::vector<float>(static_cast<std::size_t>(count), 1.0F));
}

/// Makes the third call of the lost rank, step by step.
void call_in_steps(const Named& named, ProcessGroup& ranks, const Tensor& tensor, const CollectiveOptions& options) {
  named.has_thread ? named.call(ranks, tensor, options) : in_steps([&] { named.call(ranks, tensor, options); });
}

/// Returns the number of steps of such a call on the lost rank.
std::uint64_t steps_of(const Named& named, std::int64_t count) {
  SharedWords words;
  run_ranks(4, [&](Group& group) {
    ProcessGroup ranks(group);
    const Tensor tensor = ones(count);
    for (int i = 0; i < 2; ++i) named.call(ranks, tensor, {});
    if (group.rank() == lost_rank) stepped.emplace(0, 0, words[1]);
    // The other ranks wait for a rank that runs one instruction at a time, on a busy machine.
    call_in_steps(named, ranks, tensor, {.timeout = 50s});
    if (group.rank() == lost_rank) words[0] = SteppedEnd::steps();
  });
  return words[0];
}

/// Ends the lost rank at that step. Checks the errors of the other ranks in this call and in later ones.
void end_at(const Named& named, std::int64_t count, std::uint64_t step, int signal) {
  CAPTURE(std::string(named.name));
  CAPTURE(count);
  CAPTURE(step);
  SharedWords words;
  const bool is_slow = count > 100 || (!over_shared_memory && step > 1);  // the calls that the lost rank runs in steps
  const CollectiveOptions options = {.timeout = signal != SIGSTOP ? 30s : is_slow ? 5000ms : 600ms};
  const auto ended = try_ranks(
      4,
      [&](Group& group) {
        ProcessGroup ranks(group);
        const Tensor tensor = ones(count);
        const auto pid = static_cast<pid_t>(group.info(lost_rank).pid);
        const Error error = error_of([&] {
          for (int i = 0;; ++i) {
            if (i == 2 && group.rank() == lost_rank) stepped.emplace(step, signal, words[0]);
            i == 2 ? call_in_steps(named, ranks, tensor, options) : named.call(ranks, tensor, options);
          }
        });
        if (signal == SIGSTOP) {
          // On a loaded machine the rank may not have reached that step.
          const bool is_slow_itself = words[0] == 0;
          ::kill(pid, SIGKILL);
          // A rank that receives from a rank which itself waits names that rank.
          const bool is_named = says(error, "pid " + std::to_string(pid) + ") made no progress: it is stopped");
          if (error.kind() != ErrorKind::timeout || !(is_named || named.is_message || is_slow_itself))
            throw RankFailure(std::string("rank 2 is stopped, and this names another cause: ") + error.what());
          return;
        }
        const std::chrono::steady_clock::time_point since{std::chrono::nanoseconds(words[0].load())};
        check_named(error, since, lost_rank, pid, over_shared_memory ? 1s : 2s);
        error_of(ErrorKind::peer_lost, {"rank 2"}, [&] { ranks.barrier(); });
      },
      30s);
  check_ended(ended, {lost_rank});
}

/// At evenly spaced steps from the first to the last, in small calls and in those of several chunks.
void end_at_each(int points, int signal) {
  const char* const asked = std::getenv("MUSTER_TEST_POINTS");
  if (asked != nullptr) points = std::atoi(asked);
  for (const Named& named : calls_here()) {
    if ((!over_shared_memory || under_sanitizer) && asked == nullptr) {
      end_at(named, 4, 1, signal);
      continue;
    }
    for (const std::int64_t count : {4, 40000}) {
      const int here = count > 4 ? (points + 1) / 3 : points;
      if (here == 0) continue;
      const std::uint64_t steps = steps_of(named, count);
      for (int point = 0; point < here; ++point)
        end_at(named, count,
               1 + steps * static_cast<std::uint64_t>(2 * point + 1) / static_cast<std::uint64_t>(2 * here), signal);
    }
  }
  CHECK(shared_memory_names().empty());
}

}  // namespace

TEST_CASE("a rank that is killed before a call, or at any step of it, is named by all within a second") {
  end_at_each(2, SIGKILL);
}

TEST_CASE("a rank that is stopped at any step is named at the deadline, as stopped") {
  end_at_each(1, SIGSTOP);
}

TEST_CASE("who cancels fails the group for all") {
  run_ranks(3, [](Group& group) {
    ProcessGroup ranks(group);
    group.barrier();  // no rank is still creating the group
    std::stop_source stop;
    if (group.rank() == 1) stop.request_stop();
    const auto cancel = [&] {
      if (group.rank() == 2) std::this_thread::sleep_for(50ms);  // the other ranks wait for it
      ranks.all_reduce(ones(1 << 20), ReduceOp::sum, {.stop = stop.get_token()});
    };
    error_of(ErrorKind::cancelled, {"rank 1"}, cancel);
    error_of(ErrorKind::cancelled, {"rank 1"}, [&] { ranks.barrier(); });
    group.barrier();  // the parent group remains usable
  });
}

TEST_CASE("a waiting rank uses almost no CPU time") {
  run_ranks(2, [](Group& group) {
    ProcessGroup ranks(group);
    const Tensor tensor = ones(2);
    const auto cpu_time = [] {
      timespec time{};
      ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
      return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
    };
    ranks.broadcast(tensor, 0);
    const auto before = cpu_time();
    if (group.rank() == 0) std::this_thread::sleep_for(1s);
    ranks.broadcast(tensor, 0);
    if (cpu_time() - before > (under_sanitizer ? 200ms : 20ms)) throw RankFailure("a wait of 1 s took too much");
  });
}

TEST_CASE("many small operations, and many groups one after another") {
  run_ranks(2, [](Group& group) {
    ProcessGroup ranks(group);
    const Tensor tensor = ones(2);
    for (int i = 0; i < 100'000; ++i) {
      ranks.broadcast(tensor, i % 2);
      ranks.barrier();
    }
    for (int i = 0; i < 200; ++i) {
      ProcessGroup another(group);
      another.all_reduce(ones(1 << 18));
    }
  });
}

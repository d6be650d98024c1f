// SPDX-License-Identifier: Apache-2.0
// Collectives whose ranks are killed, stopped or cancel: at every call, before it and in its middle.

#include <random>

#include "doctest/doctest.h"
#include "muster/process_group.hpp"
#include "tests/support/kills.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int size = 4;
constexpr int victim = 2;

struct Named {
  const char* name;
  void (*call)(ProcessGroup&, const Tensor&, const CollectiveOptions&);
};
const Named calls[] = {
    {"barrier", [](ProcessGroup& g, const Tensor&, const CollectiveOptions& o) { g.barrier(o); }},
    {"all_reduce",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { g.all_reduce(t, ReduceOp::sum, o); }},
    {"reduce", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { g.reduce(t, 1, ReduceOp::sum, o); }},
    {"broadcast", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { g.broadcast(t, victim, o); }},
    {"reduce_scatter", [](ProcessGroup& g, const Tensor& t,
                          const CollectiveOptions& o) { (void)g.reduce_scatter(t, 0, ReduceOp::sum, o); }},
    {"all_gather", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { (void)g.all_gather(t, 0, o); }},
    {"all_to_all", [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { (void)g.all_to_all(t, o); }},
    {"all_gather_config",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) { (void)g.all_gather_config(t, o); }},
    {"irecv",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) {
       std::vector<Work<void>> sends;
       for (int to = 0; to < size && g.rank() == victim; ++to)
         if (to != victim) sends.push_back(g.isend(t, to, 0, o));
       if (g.rank() != victim) (void)g.irecv(t, g.rank() == 0 ? any_rank : victim, 0, o).get();
       for (auto& each : sends) each.get();
     }},
    {"all_reduce",
     [](ProcessGroup& g, const Tensor& t, const CollectiveOptions& o) {
       g.start([&](ProcessGroup& own) { own.all_reduce(t, ReduceOp::sum, o); }).get();
     }},
};

const bool over_shared_memory = std::getenv("MUSTER_TEST_GROUP") == nullptr;

/// By messages all calls are the same few steps.
std::span<const Named> calls_here() {
  return over_shared_memory ? std::span(calls) : std::span(calls).subspan(1, 2);
}

Tensor ones(std::int64_t count) {
  return Tensor::take(std::vector<float>(static_cast<std::size_t>(count), 1.0F));
}

/// Kills the victim by `end`, in a loop of calls, and looks at what the others hear, then and in later calls.
void kill_in(const Named& named, std::int64_t count, const std::function<void()>& end) {
  const auto ended = try_ranks(
      size,
      [&](SyncGroup& group) {
        ProcessGroup ranks(group);
        const Tensor tensor = ones(count);
        const auto pid = static_cast<pid_t>(group.info(victim).pid);
        std::chrono::steady_clock::time_point since;
        const Error error = error_of([&] {
          for (int i = 0;; ++i) {
            if (i == 2 && group.rank() == victim) end();
            since = std::chrono::steady_clock::now();
            named.call(ranks, tensor, {});
          }
        });
        check_named(error, since, victim, pid, over_shared_memory ? 1s : 2s);
        error_of(ErrorKind::peer_lost, {"rank 2"}, [&] { ranks.barrier(); });
      },
      30s);
  check_ended(ended, {victim});
}

}  // namespace

TEST_CASE("a rank that is killed before a call, or in its middle, is named by all within a second") {
  std::mt19937 random(2026);
  for (const Named& named : calls_here()) {
    CAPTURE(std::string(named.name));
    kill_in(named, 4, [] { ::raise(SIGKILL); });
    for (int i = 0; i < (over_shared_memory ? 4 : 1); ++i)
      kill_in(named, i % 2 == 0 ? 8 << 20 : 100, [&] { kill_self_after(std::chrono::microseconds(random() % 30000)); });
  }
  CHECK(shared_memory_names().empty());
}

TEST_CASE("a rank that is stopped is named by the deadline, as stopped") {
  for (const Named& named : calls_here()) {
    CAPTURE(std::string(named.name));
    run_ranks(size,
              [&](SyncGroup& group) {
                ProcessGroup ranks(group);
                const Tensor tensor = ones(1 << 20);
                const auto pid = static_cast<pid_t>(group.info(victim).pid);
                named.call(ranks, tensor, {});
                if (group.rank() == victim) ::raise(SIGSTOP);
                const Error error = error_of(ErrorKind::timeout, {"pid " + std::to_string(pid), "stopped", named.name},
                                             [&] { named.call(ranks, tensor, {.timeout = 300ms}); });
                ::kill(pid, SIGKILL);
              },
              {victim});
  }
}

TEST_CASE("who cancels fails the group for all") {
  run_ranks(3, [](SyncGroup& group) {
    ProcessGroup ranks(group);
    std::stop_source stop;
    if (group.rank() == 1) stop.request_stop();
    const auto cancel = [&] {
      if (group.rank() == 2) std::this_thread::sleep_for(50ms);  // the others wait for it
      ranks.all_reduce(ones(1 << 20), ReduceOp::sum, {.stop = stop.get_token()});
    };
    error_of(ErrorKind::cancelled, {"rank 1"}, cancel);
    error_of(ErrorKind::cancelled, {"rank 1"}, [&] { ranks.barrier(); });
    group.barrier();  // the group that it was made of is as ever
  });
}

TEST_CASE("many small operations, and many groups one after another") {
  run_ranks(2, [](SyncGroup& group) {
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

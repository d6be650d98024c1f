// SPDX-License-Identifier: Apache-2.0
// Wake-ups arrive: no wait ends only because its sleep is over. One rank waits, and the other makes its call some
// milliseconds later and publishes the time. The median of many turns is far below the longest sleep, also on a busy
// machine. A lost wake-up would make it nearly as long as the sleep.
//
// Messages have no such test: a rank that waits for one polls at growing intervals. An interval is never longer than
// 1/64 of the time it has waited.
// The launcher of one host has none either: it waits in poll() for the pipes of its ranks themselves, so no wake-up can
// be lost.

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/async.hpp"
#include "muster/gather_each.hpp"
#include "muster/message_queue.hpp"
#include "muster/process_group.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/launch/nodes.hpp"
#include "src/os/process.hpp"
#include "src/shm/window_ring.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/memory_source.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/stepped_end.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using std::chrono::milliseconds;

constexpr int turns = 15;
const std::vector<int> two = {0, 1};

/// The calls of the two ranks in each turn.
struct Wait {
  std::function<void(int turn)> wait;
  std::function<void(int turn)> wake;
  std::function<void(int turn)> prepare = {};  // runs on both ranks, before the wait
  int waiter = 0;
  milliseconds sleep = group::Watchdog::slice;  // the longest sleep in the wait
};
struct Kind {
  std::string name;
  std::function<Wait(Group&)> make;
  bool needs_memory = false;
};

void check_latency(Group& group, const Wait& wait, SharedWords& words) {
  std::vector<std::uint64_t> latencies;
  for (int turn = 0; turn < turns; ++turn) {
    if (wait.prepare) wait.prepare(turn);
    group.barrier();
    if (group.rank() == wait.waiter) {
      wait.wait(turn);
      latencies.push_back(now_ns() - words[0]);
    } else {
      std::this_thread::sleep_for(wait.sleep / 4);
      words[0] = now_ns();
      wait.wake(turn);
    }
    group.barrier();
  }
  if (latencies.empty()) return;
  std::ranges::nth_element(latencies, latencies.begin() + turns / 2);
  const milliseconds median(latencies[turns / 2] / 1'000'000);
  // Files are polled.
  if (median >= (group.kind() == "file" ? 500ms : wait.sleep / 2))
    throw RankFailure("the wait ends " + std::to_string(median.count()) + " ms after its reason");
}

/// Both ranks make the same call.
Wait together(const std::function<void(int)>& call) {
  return {call, call};
}

/// Rank 0 delivers two items in order. The first one has bytes of rank 1, which reads them late.
void assemble_in_order(Group& group) {
  struct Source final : MemorySource {
    bool is_late = false;
    void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override {
      if (is_late) std::this_thread::sleep_for(group::Watchdog::slice / 8);
      MemorySource::read(tensor, offset, target);
    }
  } source;
  source.add("weight", DType::u8, {8}, std::vector<std::byte>(8));
  source.is_late = group.rank() == 1;
  ProcessWork work;
  work.window_bytes = 4096;
  work.depth = 1;
  work.targets.emplace_back().name = "file";
  for (const StepKind kind : {StepKind::window, StepKind::direct}) {
    if (source.is_late && kind == StepKind::direct) break;
    Step& step = work.steps.emplace_back();
    step.kind = kind;
    step.offset = kind == StepKind::direct ? 8 : 0;
    step.bytes = 8;
    step.contributors = 1;
    if (source.is_late || kind == StepKind::direct) step.copies = {{.bytes = 8, .rows = 1}};
  }
  work.turns = source.is_late ? 0 : 1;
  std::uint64_t next = 0;
  assemble(
      group, work, source, {}, [](std::uint32_t) {}, {},
      [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte>) {
        RANK_CHECK(offset == next);
        next += 8;
      });
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  all.push_back({"a round", [](Group& group) { return together([&](int) { group.barrier(); }); }});
  for (const bool is_round : {false, true}) {
    all.push_back({is_round ? "a failure, for who is in a round" : "a failure, for who waits for a message",
                   [is_round](Group& group) {
                     auto copy = std::make_shared<std::shared_ptr<Group>>();
                     const auto wait = [copy, is_round](int) {
                       (void)error_of([&] { is_round ? (*copy)->barrier() : (void)(*copy)->receive(1, 100); });
                     };
                     const auto fail = [copy](int) {
                       group::inside(**copy).abort(Error(ErrorKind::cancelled, "enough", {.rank = 1}));
                     };
                     return Wait{wait, fail, [copy, &group](int) { *copy = group.duplicate(); }};
                   }});
  }
  all.push_back({"a gather", [](Group& group) {
                   return together([&, mine = pattern(DType::u8, {100'000}, 1)](int) {
                     (void)get_tensors_parallel(mine, two, group);
                   });
                 }});
  all.push_back({"a merge that adds", [](Group& group) {
                   return together([&, mine = pattern(DType::f32, {500'000}, 1)](int) {
                     (void)merge_tensor_parallel(mine, merge::sum(), two, group);
                   });
                 }});
  all.push_back({"a work on the group's lane", [](Group& group) {
                   return together([&, mine = pattern(DType::u8, {1000}, 1)](int) {
                     (void)get_tensors_async(mine, two, group).get();
                   });
                 }});
  all.push_back({"a layer of a stream", [](Group& group) {
                   return together([&, mine = pattern(DType::u8, {100'000}, 1)](int) {
                     const auto source = [&, given = 0]() mutable -> std::optional<Config> {
                       return given++ == 2 ? std::nullopt : std::optional<Config>(mine);
                     };
                     gather_each(source, two, group, [](LayerPart&) {});
                   });
                 }});
  for (const std::int64_t elements : {100, 330'000}) {
    all.push_back(
        {elements == 100 ? "a collective" : "a collective of more chunks than its ring has", [elements](Group& group) {
           const auto ranks = std::make_shared<ProcessGroup>(group);
           const Tensor mine = pattern(DType::i32, {elements}, 1);
           return together([ranks, mine](int) { ranks->all_reduce(mine, ReduceOp::max); });
         }});
  }
  const auto queue_of = [](Group& group) {
    return std::make_shared<MessageQueue>(group, QueueOptions{.writer = 1, .capacity = 64 << 10});
  };
  all.push_back(
      {"a message of a queue",
       [queue_of](Group& group) {
         const auto queue = queue_of(group);
         return Wait{[queue](int) { (void)queue->get(); }, [queue](int) { queue->put(std::vector<std::byte>(10)); }};
       },
       true});
  all.push_back({"room in a queue",
                 [queue_of](Group& group) {
                   const auto queue = queue_of(group);
                   return Wait{.wait = [queue](int) { queue->put(std::vector<std::byte>(200'000)); },
                               .wake = [queue](int) { (void)queue->get(); },
                               .waiter = 1};
                 },
                 true});
  all.push_back({"the end of a lease",
                 [](Group& group) {
                   const auto result = std::make_shared<std::optional<GatheredTensors>>();
                   const auto prepare = [result, &group](int turn) {
                     const Tensor mine = pattern(DType::u8, {1 << 20}, static_cast<std::uint64_t>(turn));
                     *result = get_tensors_parallel(mine, two, group);
                   };
                   return Wait{.wait = [result](int) { RANK_CHECK((*result)->wait_released(10s)); },
                               .wake = [result](int) { result->reset(); },
                               .prepare = prepare,
                               .waiter = 1,
                               .sleep = 20ms};
                 },
                 true});
  struct Rings {
    explicit Rings(Group& all) : group(group::inside(all)), own(1, 4096, 1) {
      others = shm::find_rings(group, std::vector{1 - group.rank()}, own, {});
    }
    group::BaseGroup& group;
    shm::WindowRing own;
    std::vector<std::unique_ptr<shm::WindowRing>> others;
    [[nodiscard]] const shm::WindowRing& of_first() const { return group.rank() == 0 ? own : *others[0]; }
  };
  all.push_back({"a window that is full",
                 [](Group& group) {
                   const auto rings = std::make_shared<Rings>(group);
                   return Wait{[rings](int turn) {
                                 const std::uint32_t number = static_cast<std::uint32_t>(turn);
                                 rings->own.wait_full(number, 1, std::vector{1}, rings->group, {});
                                 rings->own.release(number);
                               },
                               [rings](int turn) {
                                 rings->of_first().claim(static_cast<std::uint32_t>(turn), 0, rings->group, {});
                                 rings->of_first().arrive(static_cast<std::uint32_t>(turn));
                               }};
                 },
                 true});
  all.push_back({"a window that is released",
                 [](Group& group) {
                   const auto rings = std::make_shared<Rings>(group);
                   const auto fill = [rings](int turn) {
                     if (rings->group.rank() == 1) rings->of_first().arrive(static_cast<std::uint32_t>(turn));
                   };
                   return Wait{.wait =
                                   [rings](int turn) {
                                     const auto next = static_cast<std::uint32_t>(turn) + 1;
                                     rings->of_first().claim(next, 0, rings->group, {});
                                   },
                               .wake = [rings](int turn) { rings->own.release(static_cast<std::uint32_t>(turn)); },
                               .prepare = fill,
                               .waiter = 1};
                 },
                 true});
  all.push_back({"a stage",
                 [](Group& group) {
                   const auto rings = std::make_shared<Rings>(group);
                   return Wait{
                       .wait =
                           [rings](int turn) {
                             const auto least = static_cast<std::uint32_t>(turn) + 1;
                             rings->of_first().wait_stage(least, std::vector{0}, rings->group, {});
                           },
                       .wake = [rings](int turn) { rings->own.set_stage(static_cast<std::uint32_t>(turn) + 1); },
                       .waiter = 1};
                 },
                 true});
  all.push_back({"the turn of an item of an export",
                 [](Group& group) { return together([&](int) { assemble_in_order(group); }); }, true});
  return all;
}

}  // namespace

TEST_CASE("every kind of wait ends soon after its reason") {
  const std::string kind = os::environment("MUSTER_TEST_GROUP").value_or("");
  for (const Kind& each : kinds()) {
    if (each.needs_memory && !kind.empty()) continue;
    CAPTURE(each.name);
    SharedWords words;
    run_ranks(2, [&](Group& group) { check_latency(group, each.make(group), words); });
  }
}

TEST_CASE("ranks that wait for the last one complete the rendezvous soon after it arrives") {
  SharedWords words;
  std::vector<std::uint64_t> latencies;
  for (int turn = 0; turn < turns; ++turn) {
    const GroupOf group(2);
    run_processes(2, [&](int rank) {
      if (rank == 1) {
        std::this_thread::sleep_for(30ms);
        words[0] = now_ns();
      }
      const auto mine = group.join(rank);
      if (rank == 0) words[1] = now_ns();
      mine->barrier();
    });
    latencies.push_back(words[1] - words[0]);
  }
  std::ranges::nth_element(latencies, latencies.begin() + turns / 2);
  // The two steps of a rendezvous. Each would wait until its next poll.
  CHECK(milliseconds(latencies[turns / 2] / 1'000'000) < 2 * group::between_questions);
}

TEST_CASE("a launcher passes the end of its ranks on, and ends itself, before its next round is due") {
  for (const bool is_told : {true, false}) {
    std::vector<std::uint64_t> latencies;
    for (int turn = 0; turn < 5; ++turn) {
      const TemporaryDirectory directory;
      auto nodes = std::make_unique<launch::Nodes>(LaunchNodes{.rendezvous = "file://" + directory / "meeting"}, 1);
      nodes->start();
      std::this_thread::sleep_for(launch::Nodes::between_rounds / 4);
      const std::uint64_t since = now_ns();
      if (is_told) {
        nodes->tell(true, 0, "");
        pollfd wanted{nodes->descriptor(), POLLIN, 0};
        CHECK(::poll(&wanted, 1, 10'000) == 1);
      } else {
        nodes.reset();
      }
      latencies.push_back(now_ns() - since);
    }
    std::ranges::nth_element(latencies, latencies.begin() + 2);
    CHECK(milliseconds(latencies[2] / 1'000'000) < launch::Nodes::between_rounds / 2);
  }
}

// SPDX-License-Identifier: Apache-2.0
// One rank is killed, stops or leaves wherever ranks can wait for each other. The other ranks must return in bounded
// time with an error that names it. No files or memory remain, and delivered results can still be read.
//
// The table of places runs over every kind of group. MUSTER_TEST_TIMER runs it under a profiler's timer, which ends
// every sleep after 5 ms.

#include <algorithm>
#include <list>

#include "doctest/doctest.h"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

/// Ends the victim's process, and publishes the moment.
class End {
 public:
  /// Kills the process. If `hangs` is given, the process first sleeps for that time.
  explicit End(std::chrono::milliseconds hangs = 0ms) : hangs_(hangs) {}

  void now() {
    moment_[0] = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
    std::this_thread::sleep_for(hangs_);
    ::raise(SIGKILL);
  }
  void after(std::chrono::microseconds delay) {
    std::thread([this, delay] {
      std::this_thread::sleep_for(delay);
      now();
    }).detach();
  }
  [[nodiscard]] Clock::time_point moment() {
    return Clock::time_point(Clock::duration(static_cast<Clock::rep>(moment_[0].load())));
  }

 private:
  std::chrono::milliseconds hangs_;
  SharedWords moment_;
};

/// The parameters of a rank at a place.
struct Part {
  Group& group;
  int victim;
  WaitOptions options;
  End& end;
  [[nodiscard]] bool is_victim() const { return group.rank() == victim; }
};

/// The other ranks at a place either do their own work or only wait for the victim. With wait_in_vain the victim ends
/// before it reaches the place.
enum class Others { work, wait, wait_in_vain };

struct Place {
  std::string name;
  std::function<void(const Part&)> run;  // runs on every rank; the victim ends in it, soon after it, or before it
  std::vector<int> victims = {0, 1, 2, 3};
  Others others = Others::work;
};

void wait_in_stream(const Part& part) {
  int layers = 0;
  const LayerSource source = [&]() -> std::optional<Config> {
    if (part.is_victim() && layers == 3) part.end.now();
    if (++layers == 50) return std::nullopt;
    return Config::object({{"w", pattern(DType::u8, {100'000}, 1)}});
  };
  gather_each(source, four, part.group, [](LayerPart&) {}, {.timeout = part.options.timeout});
}

/// An endless stream. Its list does not include rank 3, and its root is rank 1.
void stream(const Part& part, std::int64_t bytes, const std::function<void(std::uint64_t layer)>& in_source,
            const std::function<void(std::uint64_t layer)>& in_consumer) {
  const Tensor& layer = *new Tensor(pattern(DType::u8, {bytes}, 1));
  std::uint64_t given = 0;
  const LayerSource source = [&]() -> std::optional<Config> {
    if (part.is_victim() && in_source) in_source(given);
    ++given;
    return Config::object({{"w", layer}});
  };
  const LayerConsumer consume = [&](LayerPart& taken) {
    if (part.is_victim() && in_consumer) in_consumer(taken.layer);
    std::this_thread::sleep_for(1ms);
  };
  gather_each(source, std::vector<int>{1, 0, 2}, part.group, consume);
}

/// Exchanges without a pause, so that a delayed kill can hit any point of them.
void merge_for_ever(const Part& part, const Merge& merge, bool is_first, std::chrono::microseconds delay) {
  // The tensor is never freed: after a failed exchange, MPI may read it until the process ends.
  const Tensor& mine = *new Tensor(pattern(DType::u8, {4096, 4096}, 7));
  if (!is_first) {
    for (int i = 0; i < 2; ++i) (void)merge_tensor_parallel(mine, merge, four, part.group);
    part.group.barrier();
  }
  if (part.is_victim()) part.end.after(delay);
  for (;;) {
    const MergeResult merged = merge_tensor_parallel(mine, merge, four, part.group);
    if (merged.tensor()) RANK_CHECK(merged.tensor()->data()[0] == mine.data()[0] || merge == merge::sum());
  }
}

void gather_for_ever(const Part& part, std::chrono::microseconds delay, bool while_reading, bool at_release) {
  const Tensor& mine = *new Tensor(pattern(DType::u8, {16 << 20}, 7));
  if (part.is_victim() && delay.count() != 0) part.end.after(delay);
  for (;;) {
    {
      const GatheredTensors result = get_tensors_parallel(mine, four, part.group);
      if (part.is_victim() && while_reading) part.end.now();
      for (const auto& [rank, tensor] : result.present())
        RANK_CHECK(tensor.data()[tensor.nbytes() - 1] == mine.data()[mine.nbytes() - 1]);
    }
    if (part.is_victim() && at_release) part.end.now();
  }
}

const Place places[] = {
    {"barrier", [](const Part& part) { part.group.barrier(part.options); }, four, Others::wait_in_vain},
    {"all-gather",
     [](const Part& part) {
       const std::array<std::byte, 8> mine{};
       std::array<std::byte, 8 * 4> all{};
       part.group.all_gather(mine, all, part.options);
     },
     {1},
     Others::wait_in_vain},
    {"receive",
     [](const Part& part) { (void)part.group.receive(part.victim, 100, part.options); },
     {1},
     Others::wait_in_vain},
    {"send",
     [](const Part& part) {
       // Sends over files are not bounded. There the rank instead waits for a message that the victim never sends.
       part.group.send(part.victim, std::vector<std::byte>(8 << 20), part.options);
       (void)part.group.receive(part.victim, 100, part.options);
     },
     {1},
     Others::wait_in_vain},
    {"messages in a circle",
     [](const Part& part) {
       if (part.is_victim()) part.end.after(10ms);
       for (const int other = (part.group.rank() + 2) % 4;;) {
         part.group.send(other, std::vector<std::byte>(1), part.options);
         (void)part.group.receive(other, 1, part.options);
         part.group.barrier(part.options);
       }
     }},
    {"wait_until",
     [](const Part& part) {
       const int on[] = {part.victim};
       part.group.wait_until([] { return false; }, [](auto longest) { ::usleep(static_cast<unsigned>(longest / 1us)); },
                             on, part.options);
     },
     {1},
     Others::wait_in_vain},
    {"gather, round 1",
     [](const Part& part) {
       (void)get_tensors_parallel(pattern(DType::u8, {1000}, 1), four, part.group, {.timeout = part.options.timeout});
     },
     four, Others::wait_in_vain},
    {"gather, copying", [](const Part& part) { gather_for_ever(part, 4ms, false, false); }},
    {"gather, reading", [](const Part& part) { gather_for_ever(part, 0us, true, false); }},
    {"gather, at the release", [](const Part& part) { gather_for_ever(part, 0us, false, true); }},
    {"concat, the first", [](const Part& part) { merge_for_ever(part, merge::concat(1), true, 6ms); }},
    {"concat, a later one", [](const Part& part) { merge_for_ever(part, merge::concat(1), false, 15ms); }},
    {"sum, the first", [](const Part& part) { merge_for_ever(part, merge::sum(), true, 6ms); }},
    {"sum, a later one", [](const Part& part) { merge_for_ever(part, merge::sum(), false, 15ms); }},
    {"merge, round 1",
     [](const Part& part) {
       (void)merge_tensor_parallel(pattern(DType::f32, {1000}, 1), merge::sum(), four, part.group,
                                   {.timeout = part.options.timeout});
     },
     four, Others::wait_in_vain},
    {"stream", wait_in_stream, {1}, Others::wait},
    {"stream, in its source",
     [](const Part& part) {
       stream(part, 100'000,
              [&](auto layer) {
                if (layer == 3) part.end.now();
              },
              {});
     },
     {0, 1, 2}},
    {"stream, in a copy",
     [](const Part& part) {
       stream(part, 24 << 20,
              [&](auto layer) {
                if (layer == 2) part.end.after(1500us);
              },
              {});
     },
     {0, 1, 2}},
    {"stream, in its consumer",
     [](const Part& part) {
       stream(part, 100'000, {}, [&](auto layer) {
         if (layer == 3) part.end.now();
       });
     },
     {1}},
    {"stream, outside of all lists",
     [](const Part& part) {
       if (part.is_victim()) part.end.after(20ms);
       stream(part, 100'000, {}, {});
     },
     {3}},
};

/// Runs a job whose victim ends at a place. `expect` checks the errors of the survivors. No rank waited at the place
/// before `since`.
using Expect = std::function<void(const Error&, const Part&, Clock::time_point since)>;
void take_part(Group& group, const Place& place, int victim, End& end, const WaitOptions& options,
               const Expect& expect) {
  const Part part{group, victim, options, end};
  // These results are delivered before the victim ends, and must outlive it.
  const auto seed = [](int rank) { return static_cast<std::uint64_t>(rank); };
  const Tensor early = pattern(DType::u8, {100000}, seed(group.rank()));
  const GatheredTensors gathered = get_tensors_parallel(early, four, group);
  const MergeResult merged = merge_tensor_parallel(early, merge::stack(), four, group);
  const Clock::time_point since = Clock::now();
  try {
    // The other ranks may already receive the error here.
    group.barrier();
    if (place.others == Others::wait_in_vain && part.is_victim()) end.now();
    place.run(part);
    throw RankFailure("nothing was thrown");
  } catch (const Error& error) {
    expect(error, part, since);
    // The next call throws the same error again, at once, on every rank.
    try {
      group.barrier();
      throw RankFailure("the group works again");
    } catch (const Error& again) {
      RANK_CHECK(again.kind() == error.kind() && again.rank() == error.rank());
    }
  }
  for (const auto& [rank, tensor] : gathered.present()) RANK_CHECK(is_pattern(tensor, DType::u8, {100000}, seed(rank)));
  for (int rank = 0; merged.tensor() && rank < 4; ++rank)
    RANK_CHECK(is_pattern(merged.tensor()->view().slice(0, rank, rank + 1), DType::u8, {1, 100000}, seed(rank)));
}

bool over_hosts() {
  const char* kind = std::getenv("MUSTER_TEST_GROUP");
  return kind != nullptr && std::string_view(kind).starts_with("mpi-");
}

/// Kills every victim of these places. All other ranks must name it, with its pid, in time.
void kill_at(bool where_others_wait) {
  for (const Place& place : places) {
    if ((place.others == Others::work) == where_others_wait) continue;
    for (const int victim : place.victims) {
      CAPTURE(place.name);
      CAPTURE(victim);
      End end;
      const auto ended = try_ranks(
          4,
          [&](Group& group) {
            take_part(group, place, victim, end, {}, [](const Error& error, const Part& part, Clock::time_point since) {
              RANK_CHECK(says(error, part.group.info(part.victim).host));
              check_named(error, std::max(since, part.end.moment()), part.victim,
                          static_cast<pid_t>(part.group.info(part.victim).pid), over_hosts() ? 2s : 1s);
            });
          },
          20s);
      check_ended(ended, {victim});
    }
  }
  CHECK(shared_memory_names().empty());
}

}  // namespace

TEST_CASE("a rank killed where others wait for it: they name rank and pid within a second") {
  kill_at(true);
}

TEST_CASE("every rank killed in the middle of its work: the others name rank and pid within a second") {
  kill_at(false);
}

TEST_CASE("a rank that hangs wherever others wait for it: a deadline of 3 s fires within 3.5 s and names it") {
  // On two hosts this rank shares a host with rank 0.
  constexpr int victim = 1;
  static constexpr auto latest = under_sanitizer ? 6000ms : 3500ms;
  std::list<GroupOf> groups;
  std::list<End> ends;
  std::list<Ranks> jobs;  // all run at the same time
  for (const Place& place : places) {
    if (place.others == Others::work) continue;
    const GroupOf& group = groups.emplace_back(4);
    End& end = ends.emplace_back(latest + 1s);
    jobs.emplace_back(4, [&](int rank) {
      const auto expect = [](const Error& error, const Part& part, Clock::time_point since) {
        if (error.kind() != ErrorKind::timeout || error.rank() != part.victim) throw RankFailure(error.what());
        const auto now = Clock::now();
        if (now - since < 3s) throw RankFailure(std::string("too early: ") + error.what());
        if (const auto late = now - part.end.moment(); late > latest)
          throw RankFailure("after " + std::to_string(late / 1ms) + " ms: " + error.what());
      };
      take_part(*group.join(rank), place, victim, end, {.timeout = 3s, .stop = {}, .phase = place.name.c_str()},
                expect);
    });
  }
  for (Ranks& job : jobs) check_ended(job.wait(20s), {victim});
}

TEST_CASE("wake-ups by other ranks do not disable the watchdog: a killed rank is named within a second") {
  const auto body = [](Group& group) {
    const pid_t victim_pid = static_cast<pid_t>(group.info(1).pid);
    group.barrier();
    if (group.rank() == 1) ::raise(SIGKILL);
    const Clock::time_point since = Clock::now();
    const Error error = error_of([&] {
      if (group.rank() == 0) (void)group.receive(1, 100);
      // Wakes rank 0 more often than it checks.
      for (;;) {
        group.send(0, std::vector<std::byte>(1));
        std::this_thread::sleep_for(1ms);
      }
    });
    check_named(error, since, 1, victim_pid, 1s);
  };
  run_ranks(3, body, {1});
}

TEST_CASE("a stopped rank ends in a timeout that names it") {
  const auto body = [](Group& group) {
    const pid_t stopped = static_cast<pid_t>(group.info(2).pid);
    if (group.rank() == 2) ::raise(SIGSTOP);
    const Tensor tensor = pattern(DType::u8, {1000}, 1);
    const Error error =
        error_of(ErrorKind::timeout, {"pid " + std::to_string(stopped), "stopped", "gather: round 1"}, [&] {
          (void)get_tensors_parallel(tensor, std::vector<int>{0, 1, 2}, group, {.timeout = 300ms});
        });
    RANK_CHECK(error.rank() == 2);
    ::kill(stopped, SIGKILL);
  };
  run_ranks(3, body, {2});
}

TEST_CASE("a rank that leaves in order is reported as a rank that left") {
  const GroupOf group(2);
  SharedWords heard;
  run_processes(2, [&](int rank) {
    auto mine = group.join(rank);
    if (rank == 1) {
      mine.reset();
      while (heard[0] == 0) std::this_thread::sleep_for(1ms);
      return;
    }
    const Error error = error_of([&] { mine->barrier(); });
    heard[0] = 1;
    RANK_CHECK(error.kind() == ErrorKind::peer_lost && says(error, "left the group"));
  });
}

TEST_CASE("a slow rank that makes progress is not a timeout") {
  run_ranks(2, [](Group& group) {
    if (group.rank() == 1) {
      for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(50ms);
        group.progress();
      }
    }
    group.barrier({.timeout = 300ms});
  });
}

TEST_CASE("a cancelled wait ends at once and notifies the other ranks") {
  run_ranks(3, [](Group& group) {
    const Tensor tensor = pattern(DType::u8, {1000}, 1);
    if (group.rank() == 2) {
      // This rank never joins the wait by itself. It returns only after the others have failed.
      while (!group.error()) std::this_thread::sleep_for(1ms);
      return;
    }
    std::stop_source source;
    std::jthread canceller;
    if (group.rank() == 0)
      canceller = std::jthread([&] {
        std::this_thread::sleep_for(100ms);
        source.request_stop();
      });
    const auto begin = Clock::now();
    const Error error = error_of([&] {
      (void)get_tensors_parallel(tensor, std::vector<int>{0, 1, 2}, group, {.stop = source.get_token()});
    });
    RANK_CHECK(error.kind() == ErrorKind::cancelled && error.rank() == 0);
    RANK_CHECK(Clock::now() - begin < 2s);
  });
}

TEST_CASE("a second thread in one group is detected; the second thread can use a duplicate") {
  run_ranks(2, [](Group& group) {
    auto copy = group.duplicate();
    {
      std::jthread waiting([&] {
        if (group.rank() == 1) std::this_thread::sleep_for(500ms);
        try {
          group.barrier();
        } catch (const Error&) {
        }
      });
      if (group.rank() == 0) {
        std::this_thread::sleep_for(100ms);
        RANK_CHECK(error_of([&] { group.barrier(); }).kind() == ErrorKind::invalid_argument);
      }
      copy->barrier();
    }
  });
}

TEST_CASE("a forked child cannot take part, and its exit changes nothing") {
  run_ranks(2, [](Group& group) {
    const Tensor tensor = pattern(DType::u8, {5000}, static_cast<std::uint64_t>(group.rank()));
    GatheredTensors all =
        get_tensors_parallel(tensor, std::vector<int>{0, 1}, group, {.root_tensors = RootTensors::copy});
    Ranks child(1, [&](int) {
      RANK_CHECK(error_of([&] { group.barrier(); }).kind() == ErrorKind::unsupported);
      all.release();  // only unmaps: the parent still holds it
    });
    RANK_CHECK(child.wait(10s).front().ok());
    group.barrier();
    // Results that came through a file are released at once.
    if (group.rank() == 1) RANK_CHECK((all.wait_released(20ms) == (group.kind() == "file")));
    for (const auto& [rank, other] : all.present())
      RANK_CHECK(is_pattern(other, DType::u8, {5000}, static_cast<std::uint64_t>(rank)));
    group.barrier();
  });
}

TEST_CASE("ranks that never arrive are named at the deadline") {
  const GroupOf group(4);
  run_processes(4, [&](int rank) {
    if (rank == 2) return;
    const Error error = error_of([&] { (void)group.join(rank, 500ms); });
    RANK_CHECK(error.kind() == ErrorKind::timeout && says(error, "rank 2"));
  });
}

TEST_CASE("two processes of one rank, and ranks with different world sizes, are refused on all") {
  const std::string key = unique_key();
  run_processes(3, [&](int process) {
    const int rank = process == 2 ? 1 : process;
    const Error error = error_of([&] { (void)local_group({.key = key, .rank = rank, .size = 3, .timeout = 5s}); });
    RANK_CHECK(error.kind() == ErrorKind::rank_mismatch);
  });
}

// SPDX-License-Identifier: Apache-2.0
// A job is suspended (SIGSTOP) for longer than its timeout while ranks wait. After SIGCONT the waits must succeed.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "muster/async.hpp"
#include "muster/gather.hpp"
#include "muster/process_group.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr auto timeout = under_sanitizer ? 8s : 3s;
constexpr auto suspension = under_sanitizer ? 10s : 5s;

/// A gate for processes, which the test opens.
class Gate {
 public:
  Gate() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0 || ::pipe2(arrivals_.data(), O_CLOEXEC) != 0)
      throw std::runtime_error("pipe2");
  }
  ~Gate() {
    for (const int end : ends_) ::close(end);
    for (const int end : arrivals_) ::close(end);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  /// Waits until a process has reached the gate.
  void await_arrival() const {
    pollfd wanted{arrivals_[0], POLLIN, 0};
    REQUIRE(::poll(&wanted, 1, 30'000) == 1);
  }
  void open() const { REQUIRE(::write(ends_[1], "g", 1) == 1); }
  /// Waits for the gate without a deadline: the test kills processes that remain.
  void pass() const {
    RANK_CHECK(::write(arrivals_[1], "a", 1) == 1);
    pollfd wanted{ends_[0], POLLIN, 0};
    while (::poll(&wanted, 1, -1) <= 0) continue;
  }

 private:
  std::array<int, 2> ends_{};
  std::array<int, 2> arrivals_{};
};

/// An operation in which ranks 0 and 2 wait until rank 1 has passed the gate.
struct Wait {
  std::string name;
  std::function<void(Group& group, const std::function<void()>& pass)> run;
  bool is_rendezvous = false;
};

void late(const Group& group, const std::function<void()>& pass) {
  if (group.rank() == 1) pass();
}

std::vector<Wait> waits() {
  return {
      {"rendezvous", [](Group& group, const auto&) { group.barrier(); }, true},
      {"barrier",
       [](Group& group, const auto& pass) {
         late(group, pass);
         group.barrier();
       }},
      {"a small and a large gather",
       [](Group& group, const auto& pass) {
         late(group, pass);
         gather_and_check(group, ranks_from(0, 3), 100, 1);
         gather_and_check(group, ranks_from(0, 3), 3 << 20, 2);
       }},
      {"a message",
       [](Group& group, const auto& pass) {
         late(group, pass);
         const std::vector<std::byte> long_one(2 << 20);
         if (group.rank() == 0) group.send(1, long_one);
         if (group.rank() == 2) (void)group.receive(1, 10);
         if (group.rank() == 1) RANK_CHECK(group.receive(0, 4 << 20) == long_one);
         if (group.rank() == 1) group.send(2, std::span(long_one).first(10));
       }},
      {"a stream",
       [](Group& group, const auto& pass) {
         const Model model = [](int rank, std::uint64_t layer) {
           return Config(pattern(DType::u8, {300'000}, seed_of(rank, layer)));
         };
         int given = 0;
         const auto source = [&]() -> std::optional<Config> {
           if (given == 6) return std::nullopt;
           if (given == 3) late(group, pass);
           return model(group.rank(), static_cast<std::uint64_t>(given++));
         };
         std::uint64_t parts = 0;
         (void)gather_each(source, ranks_from(0, 3), group, [&](LayerPart&) { ++parts; });
         if (group.rank() == 0) RANK_CHECK(parts >= 6);
       }},
      {"an asynchronous gather",
       [](Group& group, const auto& pass) {
         late(group, pass);
         auto work = get_tensors_async(pattern(DType::u8, {1000}, 1), ranks_from(0, 3), group);
         // The time of this wait also pauses.
         RANK_CHECK(work.wait_for(timeout));
         (void)work.get();
       }},
      {"a process group",
       [](Group& group, const auto& pass) {
         ProcessGroup process_group(group);
         late(group, pass);
         process_group.barrier();
         process_group.all_reduce(pattern(DType::i32, {70000}, 3));
       }},
  };
}

void check_all(const std::vector<Wait>& all, const std::vector<int>& suspended) {
  std::vector<std::unique_ptr<Gate>> gates;
  std::vector<std::unique_ptr<GroupOf>> groups;
  std::vector<std::unique_ptr<Ranks>> jobs;
  for (const Wait& wait : all) {
    const Gate& gate = *gates.emplace_back(std::make_unique<Gate>());
    const GroupOf& group = *groups.emplace_back(std::make_unique<GroupOf>(3));
    jobs.push_back(std::make_unique<Ranks>(3, [&](int rank) {
      if (wait.is_rendezvous && rank == 1) gate.pass();
      const auto joined = group.join(rank, timeout);
      wait.run(*joined, [&] { gate.pass(); });
    }));
  }
  const auto signal_all = [&](int number) {
    for (const auto& job : jobs)
      for (const int rank : suspended) job->signal(rank, number);
  };
  // On a busy machine a rank may need seconds to reach the gate. No rank may be suspended before that.
  for (const auto& gate : gates) gate->await_arrival();
  std::this_thread::sleep_for(500ms);
  signal_all(SIGSTOP);
  std::this_thread::sleep_for(suspension);
  signal_all(SIGCONT);
  std::this_thread::sleep_for(300ms);
  for (const auto& gate : gates) gate->open();
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO(all[i].name);
    check_ended(jobs[i]->wait(30s));
  }
}

}  // namespace

TEST_CASE("a job that is suspended for longer than its timeout continues when it is resumed") {
  check_all(waits(), {0, 1, 2});
}

TEST_CASE("ranks that wait and are suspended for longer than their timeout continue when they are resumed") {
  check_all(waits(), {0, 2});
}

TEST_CASE("the error names a rank that is suspended for longer than the timeout, and that rank throws the same cause") {
  const GroupOf group(3);
  Ranks ranks(3, [&](int rank) {
    const auto joined = group.join(rank, timeout);
    joined->barrier();
    if (rank == 1) ::raise(SIGSTOP);
    const Error error = error_of(ErrorKind::timeout, {"rank 1"}, [&] { joined->barrier(); });
    RANK_CHECK(error.rank() == 1);
  });
  std::this_thread::sleep_for(suspension);
  ranks.signal(1, SIGCONT);
  check_ended(ranks.wait(30s));
}

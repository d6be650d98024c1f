// SPDX-License-Identifier: Apache-2.0
// However a group of many hosts fails, all survivors soon throw one cause, which names a rank that has failed. Ranks
// are killed, stopped or cancelled, or run out of descriptors, at random moments. Then a second rank is killed or
// stopped at each step of the agreement, from the first notice to the last decision. MUSTER_TEST_TURNS sets the number
// of cases that run.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "src/os/process.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/imitated_hosts.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

// Two ranks share host 0, the root of the tree. Host 1 has three hosts below it.
constexpr int size = 13;
constexpr int hosts = 12;
constexpr int root = 0;
constexpr int inner = 2;
constexpr int leaf = 12;

enum class How { killed, stopped, cancelled, out_of_descriptors };

struct Case {
  int first = 0;
  How how = How::killed;
  int second = -1;          ///< -1: no second rank
  bool is_stopped = false;  ///< true: the second rank is stopped; false: it is killed
  int step = 0;             ///< the second rank fails before it sends its message number `step` about the failure
  std::chrono::microseconds moment{};
};

std::string words_of(const Case& one) {
  constexpr const char* ways[] = {"killed", "stopped", "cancelled", "out of descriptors"};
  return "rank " + std::to_string(one.first) + " is " + ways[static_cast<int>(one.how)] + " after " +
         std::to_string(one.moment.count()) + " us, rank " + std::to_string(one.second) + " is " +
         (one.is_stopped ? "stopped" : "killed") + " at step " + std::to_string(one.step);
}

void use_up_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = static_cast<rlim_t>(::dup(0));
  ::close(static_cast<int>(limit.rlim_cur));
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::uint64_t now() {
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
}

void fail_first(Group& group, const Case& one, SharedWords& words) {
  std::this_thread::sleep_for(one.moment);
  words[0] = now();
  if (one.how == How::killed) ::raise(SIGKILL);
  if (one.how == How::stopped) ::raise(SIGSTOP);
  if (one.how == How::out_of_descriptors) {
    use_up_descriptors();
    // This rank has no connection to that rank yet, and needs a descriptor for it.
    group.send(one.first == 7 ? 8 : 7, std::array<std::byte, 8>{});
  }
  std::stop_source source;
  source.request_stop();
  for (;;) group.barrier({.timeout = {}, .stop = source.get_token(), .phase = "rounds"});
}

/// Runs one case. Returns the time that the survivors took.
Clock::duration run(const Case& one) {
  SharedWords words;
  const std::string address = free_local_address();
  Ranks ranks(size, [&](int rank) {
    const auto group = join_on_host(address, rank, size, hosts, 20s);
    group->barrier();
    group->barrier();
    if (one.how == How::stopped) group->set_timeout(800ms);
    const FailingCall steps(
        {.call = "send", .path = "about a failure", .after = rank == one.second ? one.step : 1 << 30, .then = [&] {
           words[1] = 1;
           ::raise(one.is_stopped ? SIGSTOP : SIGKILL);
         }});
    const Error error = error_of([&] {
      if (rank == one.first) fail_first(*group, one, words);
      for (;;) group->barrier();
    });
    words[2].fetch_add(1);
    std::uint64_t latest = words[3].load();
    while (latest < now() - words[0] && !words[3].compare_exchange_weak(latest, now() - words[0])) continue;
    RANK_CHECK(error.rank().has_value());
    say(std::to_string(*error.rank()) + ": " + error.what());
    RANK_CHECK(error_of([&] { group->barrier(); }).what() == std::string(error.what()));
  });
  std::set<int> gone;
  if (one.how == How::killed || one.how == How::stopped) gone.insert(one.first);
  // The test kills a stopped rank only after all other ranks have thrown.
  const auto until = Clock::now() + 20s;
  const auto survivors = [&] { return size - gone.size() - (words[1] != 0 && !gone.contains(one.second) ? 1 : 0); };
  while (words[2] < survivors() && Clock::now() < until) std::this_thread::sleep_for(1ms);
  if (words[1] != 0) gone.insert(one.second);
  for (const int rank : gone) ranks.signal(rank, SIGKILL);
  const std::vector<Ended> ended = ranks.wait(20s);
  std::set<std::string> causes;
  std::string all;
  for (int rank = 0; rank < size; ++rank) {
    const Ended& it = ended[static_cast<std::size_t>(rank)];
    all += "\n  rank " + std::to_string(rank) + (gone.contains(rank) ? " (gone): " : ": ") + it.words;
    if (gone.contains(rank)) continue;
    CHECK_MESSAGE(it.ok(), "rank ", rank, ": ", it.words);
    causes.insert(it.words);
  }
  CHECK_MESSAGE(causes.size() == 1, words_of(one), all);
  const int named = causes.empty() ? -1 : std::atoi(causes.begin()->c_str());
  const bool is_right = named == one.first || (named == one.second && gone.contains(one.second));
  CHECK_MESSAGE(is_right, words_of(one), all);
  return Clock::duration(static_cast<Clock::rep>(words[3].load()));
}

int turns(int otherwise) {
  const auto text = os::environment("MUSTER_TEST_TURNS");
  return text ? std::atoi(text->c_str()) : otherwise;
}

void run_all(std::vector<Case> cases, int most) {
  std::mt19937 random(2026);
  std::ranges::shuffle(cases, random);
  if (static_cast<int>(cases.size()) > most) cases.resize(static_cast<std::size_t>(most));
  for (const Case& one : cases) {
    CAPTURE(words_of(one));
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(run(one));
    const auto deadline = one.how == How::stopped ? 800ms : 0ms;
    // A busy machine adds up to two seconds.
    CHECK(took.count() < (deadline + 2s + 2s).count());
    MESSAGE(words_of(one), ": ", took.count(), " ms");
  }
}

}  // namespace

TEST_CASE("one rank fails at a random moment: one cause") {
  std::mt19937 random(7);
  std::vector<Case> cases;
  for (const int first : {root, 1, inner, 5, leaf})
    for (const How how : {How::killed, How::stopped, How::cancelled, How::out_of_descriptors})
      cases.push_back({.first = first, .how = how, .moment = std::chrono::microseconds(random() % 30000)});
  run_all(cases, turns(10));
}

TEST_CASE("a second rank fails at each step of the agreement: one cause") {
  std::vector<Case> cases;
  for (const int first : {root, 5, leaf})
    for (const How how : {How::killed, How::cancelled, How::out_of_descriptors})
      for (const int second : {root, inner, 3, 11})
        for (const bool is_stopped : {false, true})
          for (int step = 0; step < 6; ++step)
            if (first != second)
              cases.push_back({.first = first, .how = how, .second = second, .is_stopped = is_stopped, .step = step});
  run_all(cases, turns(16));
}

// SPDX-License-Identifier: Apache-2.0
// An answer of several pieces that one rank of a host gives to the others (LocalGroup::give_answer). A reader is late,
// dies or stops after it has read some pieces, or the giver stops between two of them.

#include <signal.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "src/group/control_block.hpp"
#include "src/group/local_group.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int giver = 0;
constexpr int inside = 1;  // the reader that something happens to after it has read two pieces
constexpr int late = 2;    // the reader that lets the giver wait

constexpr auto patience = 20s;

/// Nine pieces, the last one of which is short.
std::vector<std::byte> long_answer(int turn) {
  std::vector<std::byte> answer(8 * group::answer_piece + 100);
  for (std::size_t i = 0; i < answer.size(); ++i)
    answer[i] = static_cast<std::byte>(i / group::answer_piece + i + static_cast<std::size_t>(turn));
  return answer;
}

/// The ranks give and take answers. In each one, the giver waits for the late reader after two pieces, and the other
/// reader waits for the third piece.
class Answers {
 public:
  /// `at_giver` and `at_reader` run in that state: in the giver, and in the reader `inside`. The late reader begins
  /// when one of them has called go().
  Answers(std::function<void()> at_giver, std::function<void()> at_reader)
      : at_giver_(std::move(at_giver)), at_reader_(std::move(at_reader)) {}

  void go() { words_[go_word].store(static_cast<std::uint64_t>(turn_) + 1); }

  void operator()(Group& group, int turns, std::chrono::milliseconds timeout) {
    auto& local = static_cast<group::LocalGroup&>(group);
    const int rank = group.rank();
    int seen = 0;  // calls of this turn that have seen the giver wait
    local.while_waiting([&]() -> std::chrono::nanoseconds {
      const bool waits = words_[giver_word].load() == static_cast<std::uint64_t>(turn_) + 1;
      if (is_in_answer_ && rank == giver && !waits) {
        words_[giver_word].store(static_cast<std::uint64_t>(turn_) + 1);
        if (at_giver_) at_giver_();
      }
      // The first such call may still belong to the wait for an earlier piece.
      if (is_in_answer_ && rank == inside && waits && ++seen == 2 && at_reader_) at_reader_();
      return 1ms;
    });
    for (turn_ = 0; turn_ < turns; ++turn_) {
      seen = 0;
      group.barrier();
      if (rank == late) await(go_word);
      is_in_answer_ = true;
      if (rank == giver)
        local.give_answer(long_answer(turn_), {.timeout = timeout, .stop = {}, .phase = "giving"});
      else
        // As in a group of several hosts, readers wait longer than the giver, if it is the giver that waits.
        RANK_CHECK(local.take_answer(giver, 1 << 20,
                                     {.timeout = timeout + (at_reader_ ? 5s : 0s), .stop = {}, .phase = "taking"}) ==
                   long_answer(turn_));
      is_in_answer_ = false;
    }
  }

 private:
  static constexpr int go_word = 0;
  static constexpr int giver_word = 1;

  void await(int word) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (words_[word].load() != static_cast<std::uint64_t>(turn_) + 1) {
      RANK_CHECK(std::chrono::steady_clock::now() < until);
      std::this_thread::sleep_for(1ms);
    }
  }

  SharedWords words_;
  std::function<void()> at_giver_;
  std::function<void()> at_reader_;
  int turn_ = 0;
  bool is_in_answer_ = false;
};

}  // namespace

TEST_CASE("a reader that is delayed inside an answer of several pieces receives all of it") {
  const GroupOf three(3);
  std::function<void()> delay;
  Answers answers({}, [&] { delay(); });
  delay = [&] {
    answers.go();
    // The other reader catches up and waits, because the giver cannot reuse the memory of this reader's pieces.
    std::this_thread::sleep_for(30ms);
  };
  run_processes(3, [&](int rank) {
    const auto group = three.join(rank);
    answers(*group, 10, 20s);
    group->barrier();
  });
}

TEST_CASE("a reader that dies inside an answer is named by all other ranks") {
  const GroupOf three(3);
  std::function<void()> die;
  Answers answers({}, [&] { die(); });
  die = [&] {
    answers.go();
    ::raise(SIGKILL);
  };
  run_processes(3, {inside}, [&](int rank) {
    const auto group = three.join(rank);
    const Error error = error_of(ErrorKind::peer_lost, {"rank 1 (host "}, [&] { answers(*group, 1, 20s); });
    RANK_CHECK(error.rank() == inside);
  });
}

TEST_CASE("a rank that stops inside an answer is named by all other ranks at the deadline") {
  for (const int stopped : {inside, giver}) {
    const GroupOf three(3);
    std::function<void()> stop;
    const auto stops = [&] { stop(); };
    Answers answers = stopped == giver ? Answers(stops, {}) : Answers({}, stops);
    stop = [&] {
      answers.go();
      ::raise(SIGSTOP);
    };
    Ranks ranks(3, [&](int rank) {
      const auto group = three.join(rank);
      const std::string name = "rank " + std::to_string(stopped) + " (host ";
      const Error error = error_of(ErrorKind::timeout, {name}, [&] { answers(*group, 1, 1s); });
      RANK_CHECK(error.rank() == stopped);
    });
    check_ended(ranks.wait_and_kill(stopped, 15s), {stopped});
  }
}

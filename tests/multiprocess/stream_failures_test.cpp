// SPDX-License-Identifier: Apache-2.0
// A rank of a stream throws, hangs, is cancelled or has fewer layers. All ranks, including those in no list, receive
// the same error at once. The group remains usable where that is promised.

#include <doctest/doctest.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

/// There are four ranks, and rank 3 is in no list.
const std::vector<int> listed = {1, 0, 2};
constexpr int first = 1;
constexpr int outsider = 3;
constexpr std::uint64_t endless = UINT64_MAX;

LayerSource layers_of_bytes(std::uint64_t layers, std::int64_t bytes, std::function<void(std::uint64_t)> before = {}) {
  return [=, next = std::uint64_t{0}]() mutable -> std::optional<Config> {
    if (before) before(next);
    if (next == layers) return std::nullopt;
    return Config::object({{"w", pattern(DType::u8, {bytes}, next++)}});
  };
}

/// Runs a whole stream and an exchange, which succeed on a usable group.
void expect_usable(Group& group) {
  std::uint64_t taken = 0;
  const auto consume = [&](LayerPart& part) {
    for (const auto& [rank, config] : part.present())
      RANK_CHECK(is_pattern(config.at("w").as_tensor(), DType::u8, {50000}, part.layer));
    ++taken;
  };
  gather_each(layers_of_bytes(5, 50000), listed, group, consume);
  RANK_CHECK(taken == (group.rank() == first ? 5 : 0));
  const Tensor mine = pattern(DType::u8, {100}, 1);
  (void)get_tensors_parallel(mine, std::vector<int>{0, 1, 2, 3}, group);
}

/// Runs a stream that must fail in the same way on every rank. Each rank reports its error message. Returns the
/// messages.
std::string fail_alike(const std::function<void(Group&)>& stream, const std::function<void(const Error&)>& check,
                       bool is_usable) {
  const auto ended = try_ranks(
      4,
      [&](Group& group) {
        expect_usable(group);
        group.barrier();
        const Error error = error_of([&] { stream(group); });
        say(error.what());
        check(error);
        if (is_usable) return expect_usable(group);
        // The next call throws the first cause again, at once.
        check(error_of([&] { group.barrier(); }));
      },
      20s);
  check_ended(ended);
  for (const Ended& one : ended) CHECK(one.words == ended[0].words);
  CHECK(shared_memory_names().empty());
  return ended[0].words;
}

std::size_t open_descriptors() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

}  // namespace

TEST_CASE("a source throws, on each rank, early and late: all ranks get the message of its rank within a second") {
  for (const int origin : listed) {
    for (const std::uint64_t layer : {0, 3}) {
      CAPTURE(origin);
      CAPTURE(layer);
      SharedWords moment;
      const auto now = [] { return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()); };
      const std::string words = fail_alike(
          [&](Group& group) {
            const auto boom = [&](std::uint64_t at) {
              if (group.rank() != origin || at != layer) return;
              moment[0] = now();
              throw std::runtime_error("no weights in layer file");
            };
            // The consumer is slow enough that all other ranks wait for the failing rank, or for credits.
            const auto consume = [](LayerPart&) { std::this_thread::sleep_for(2ms); };
            gather_each(layers_of_bytes(endless, 100000, boom), listed, group, consume);
          },
          [&](const Error& error) {
            RANK_CHECK(error.kind() == ErrorKind::io);
            RANK_CHECK(error.rank() == origin);
            RANK_CHECK(!error.host().empty());
            RANK_CHECK(now() - moment[0] < 1'000'000'000);
          },
          true);
      CHECK(words.find("rank " + std::to_string(origin) + " (host ") != std::string::npos);
      CHECK(words.find("the source threw at layer " + std::to_string(layer) + ": no weights in layer file") !=
            std::string::npos);
    }
  }
}

TEST_CASE("a consumer throws: an Error keeps its kind and path, and the group remains usable") {
  const std::string words = fail_alike(
      [](Group& group) {
        const auto consume = [](LayerPart& part) {
          if (part.layer == 4)
            throw Error(ErrorKind::out_of_space, "the disk is full", {.path = "/out/model.safetensors"});
        };
        gather_each(layers_of_bytes(endless, 100000), listed, group, consume);
      },
      [](const Error& error) {
        RANK_CHECK(error.kind() == ErrorKind::out_of_space);
        RANK_CHECK(error.rank() == first);
        RANK_CHECK(error.path() == "/out/model.safetensors");
      },
      true);
  CHECK(words.find("the consumer threw at layer 4: the disk is full") != std::string::npos);
}

TEST_CASE("a config that no route supports is a failure of its rank, with the layer's number") {
  const std::string words = fail_alike(
      [](Group& group) {
        std::uint64_t given = 0;
        const auto source = [&]() -> std::optional<Config> {
          return group.rank() == 2 && ++given == 3 ? Config("\xff") : Config("x");
        };
        gather_each(source, listed, group, [](LayerPart&) {});
      },
      [](const Error& error) { RANK_CHECK(error.kind() == ErrorKind::invalid_argument && error.rank() == 2); }, true);
  CHECK(words.find("layer 2: config: a key or string is not valid UTF-8") != std::string::npos);
}

TEST_CASE("sources of different lengths: all ranks get the number of layers of each rank") {
  for (const int shorter : listed) {
    CAPTURE(shorter);
    const std::string words = fail_alike(
        [&](Group& group) {
          gather_each(layers_of_bytes(group.rank() == shorter ? 3 : 6, 100000), listed, group, [](LayerPart&) {});
        },
        [](const Error& error) { RANK_CHECK(error.kind() == ErrorKind::rank_mismatch); }, true);
    for (const int rank : listed)
      CHECK(words.find("rank " + std::to_string(rank) + (rank == shorter ? " 3" : " more than 3")) !=
            std::string::npos);
  }
}

TEST_CASE("a failure of another list also ends the stream of this list") {
  fail_alike(
      [](Group& group) {
        const bool is_failing = group.rank() >= 2;
        const auto boom = [&](std::uint64_t layer) {
          if (group.rank() == 3 && layer == 5) throw std::runtime_error("boom");
        };
        gather_each(layers_of_bytes(endless, 10000, boom), is_failing ? std::vector<int>{2, 3} : std::vector<int>{0, 1},
                    group, [](LayerPart&) {});
      },
      [](const Error& error) { RANK_CHECK(error.rank() == 3); }, true);
}

TEST_CASE("repeated failures leak no descriptors") {
  run_ranks(4, [](Group& group) {
    std::size_t after_two = 0;
    for (int round = 0; round < 8; ++round) {
      const auto boom = [&](std::uint64_t layer) {
        if (group.rank() == round % 3 && layer == 2) throw std::runtime_error("boom");
      };
      (void)error_of([&] { gather_each(layers_of_bytes(endless, 100000, boom), listed, group, [](LayerPart&) {}); });
      group.barrier();
      if (round == 1) after_two = open_descriptors();
    }
    RANK_CHECK(open_descriptors() == after_two);
    expect_usable(group);
  });
}

namespace {

/// Runs a stream in which rank `slow` works longer than the deadline, in its consumer or its source.
void slow_stream(Group& group, int slow, bool tells) {
  const auto work = [&] {
    for (int i = 0; i < 60; ++i) {
      std::this_thread::sleep_for(20ms);
      if (tells) group.progress();
    }
  };
  const bool is_slow = group.rank() == slow;
  const auto before = [&](std::uint64_t layer) {
    if (is_slow && slow != first && layer == 3) work();
  };
  const auto consume = [&](LayerPart& part) {
    if (is_slow && part.layer == 3) work();
  };
  gather_each(layers_of_bytes(8, 10000, before), listed, group, consume, {.timeout = 500ms});
}

}  // namespace

TEST_CASE("a consumer or source that takes longer than the deadline and reports progress does not time out") {
  for (const int slow : {first, 2}) {
    CAPTURE(slow);
    run_ranks(4, [&](Group& group) { slow_stream(group, slow, true); });
  }
}

TEST_CASE("a consumer or source that hangs is a timeout on all ranks") {
  for (const int slow : {first, 2}) {
    CAPTURE(slow);
    fail_alike([&](Group& group) { slow_stream(group, slow, false); },
               [](const Error& error) { RANK_CHECK(error.kind() == ErrorKind::timeout); }, false);
  }
}

TEST_CASE("a stream longer than the deadline: ranks that have finished or are in no list keep waiting") {
  run_ranks(4, [](Group& group) {
    const auto consume = [](LayerPart&) { std::this_thread::sleep_for(12ms); };
    gather_each(layers_of_bytes(60, 1000), listed, group, consume, {.timeout = 400ms});
  });
}

TEST_CASE("a stop token on any rank cancels the stream of all") {
  for (const int cancelled : {first, 2, outsider}) {
    CAPTURE(cancelled);
    fail_alike(
        [&](Group& group) {
          std::stop_source stop;
          std::jthread stopping;
          if (group.rank() == cancelled)
            stopping = std::jthread([&] {
              std::this_thread::sleep_for(30ms);
              stop.request_stop();
            });
          gather_each(layers_of_bytes(endless, 10000), listed, group, [](LayerPart&) {}, {.stop = stop.get_token()});
        },
        [&](const Error& error) {
          RANK_CHECK(error.kind() == ErrorKind::cancelled);
          RANK_CHECK(error.rank() == cancelled);
        },
        false);
  }
}

TEST_CASE("source and consumer may use another group during a stream") {
  run_ranks(3, [](Group& group) {
    const auto other = group.duplicate();
    const auto before = [&](std::uint64_t) { other->barrier(); };
    std::uint64_t taken = 0;
    gather_each(layers_of_bytes(5, 1000, before), std::vector<int>{0, 1, 2}, group, [&](LayerPart&) { ++taken; },
                {.pipeline_depth = 8});
    RANK_CHECK(taken == (group.rank() == 0 ? 5 : 0));
  });
}

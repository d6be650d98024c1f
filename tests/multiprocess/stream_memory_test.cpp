// SPDX-License-Identifier: Apache-2.0
// The shared memory that a stream uses, as the kernel counts it, and how far senders run ahead, by their own count.

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <thread>
#include <utility>

#include "muster/gather_each.hpp"
#include "muster/shared_arena.hpp"
#include "src/shm/segment.hpp"
#include "src/trace/rings.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// Returns the memory of this process's slots.
std::uint64_t own_segment_bytes() {
  struct ::stat facts {};
  RANK_CHECK(::fstat(group::Region::own()->memory()->get(), &facts) == 0);
  return static_cast<std::uint64_t>(facts.st_blocks) * 512 - trace::ring_bytes;
}

Config small_layer(std::uint64_t layer) {
  return Config::object({{"w", pattern(DType::u8, {8000}, layer)}});
}

/// Waits until the count has the expected value, then checks for a moment that it does not grow.
void expect_count(const std::atomic<std::uint64_t>& word, std::uint64_t expected) {
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (word < expected) {
    RANK_CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(1ms);
  }
  std::this_thread::sleep_for(2ms);
  RANK_CHECK(word == expected);
}

}  // namespace

TEST_CASE("a stream of 20 times the budget: the kernel never counts more than the budget for all senders together") {
  SharedWords used;
  constexpr std::uint64_t budget = 4_MiB;
  run_ranks(4, [&](SyncGroup& group) {
    std::uint64_t received = 0;
    std::uint64_t most = 0;
    const auto make = [&](std::uint64_t layer) {
      used[group.rank()] = own_segment_bytes();
      const auto rows = static_cast<std::int64_t>(layer % 3 == 0 ? 3000 : 300);
      return Config::object(
          {{"norm", pattern(DType::f32, {100}, layer)}, {"w", pattern(DType::u8, {rows, 1000}, layer)}});
    };
    const auto consume = [&](LayerPart& part) {
      std::uint64_t sum = 0;
      for (const int rank : four) sum += rank == 0 ? 0 : used[rank].load();
      most = std::max(most, sum);
      RANK_CHECK(sum <= budget);
      for (std::size_t i = 1; i < part.configs.size(); ++i)
        if (part.configs[i] && part.configs[i]->at("w").is_tensor())
          received += part.configs[i]->at("w").as_tensor().nbytes();
    };
    const StreamReport report = gather_each(layers_of(25, make), four, group, consume, {.memory_budget = budget});
    RANK_CHECK(report.peak_slot_bytes <= budget / 3);
    if (group.rank() != 0) {
      RANK_CHECK(own_segment_bytes() <= budget / 3);
      RANK_CHECK(trim(group) != 0);
      RANK_CHECK(own_segment_bytes() <= 3 * shm::header_bytes);
      return;
    }
    RANK_CHECK(received >= 20 * budget);
    RANK_CHECK(most > budget / 2);
    RANK_CHECK(own_segment_bytes() == 0);
  });
}

TEST_CASE("senders are ahead of the consumer by the pipeline's depth, and no further") {
  for (const int depth : {1, 2, 4}) {
    CAPTURE(depth);
    SharedWords asked;
    run_ranks(3, [&](SyncGroup& group) {
      constexpr std::uint64_t layers = 6;
      const auto make = [&](std::uint64_t layer) {
        ++asked[group.rank()];
        return small_layer(layer);
      };
      const auto consume = [&](LayerPart& part) {
        const std::uint64_t ahead = std::min(part.layer + static_cast<std::uint64_t>(depth), layers);
        for (const int sender : {1, 2}) expect_count(asked[sender], ahead);
      };
      gather_each(layers_of(layers, make), std::vector<int>{0, 1, 2}, group, consume, {.pipeline_depth = depth});
    });
  }
}

TEST_CASE("what the consumer keeps holds credits until another thread releases it, and outlives the stream") {
  SharedWords asked;
  run_ranks(2, [&](SyncGroup& group) {
    constexpr std::uint64_t layers = 8;
    const auto make = [&](std::uint64_t layer) {
      ++asked[group.rank()];
      return small_layer(layer);
    };
    std::vector<Tensor> kept;
    Tensor newest;
    Tensor older;
    std::thread releasing;
    const auto consume = [&](LayerPart& part) {
      // The consumer keeps both parts in flight: the sender waits until they are released.
      if (part.layer < 2) kept.push_back(part.configs[1]->at("w").as_tensor());
      if (part.layer == 1) {
        expect_count(asked[1], 2);
        releasing = std::thread([taken = std::exchange(kept, {})]() mutable {
          std::this_thread::sleep_for(30ms);
          taken.clear();
        });
      }
      // This tensor is kept during the next stream, and does not use its credits or budget.
      if (part.layer == layers - 1) newest = part.configs[1]->at("w").as_tensor();
    };
    for (int round = 0; round < 3; ++round) {
      asked[group.rank()] = 0;
      group.barrier();
      gather_each(layers_of(layers, make), std::vector<int>{0, 1}, group, consume, {.memory_budget = 24_KiB});
      group.barrier();
      if (group.rank() != 0) continue;
      releasing.join();
      RANK_CHECK(round == 0 || is_pattern(older, DType::u8, {8000}, layers - 1));
      RANK_CHECK(is_pattern(newest, DType::u8, {8000}, layers - 1));
      older = newest;
    }
  });
}

TEST_CASE("a consumer that keeps all parts ends in a timeout that names the cause") {
  const auto ended = try_ranks(2, [](SyncGroup& group) {
    std::vector<Tensor> kept;
    const auto consume = [&](LayerPart& part) { kept.push_back(part.configs[1]->at("w").as_tensor()); };
    const Error error = error_of(ErrorKind::timeout, {"gather_each: "}, [&] {
      gather_each(layers_of(8, small_layer), std::vector<int>{0, 1}, group, consume, {.timeout = 200ms});
    });
    RANK_CHECK(kept.size() == (group.rank() == 0 ? 2 : 0));
    for (std::uint64_t i = 0; i < kept.size(); ++i) RANK_CHECK(is_pattern(kept[i], DType::u8, {8000}, i));
    say(error.what());
  });
  check_ended(ended);
  CHECK(ended[0].words == ended[1].words);
}

TEST_CASE("arena tensors are sent as references, however small the budget, and their leases are the credits") {
  run_ranks(3, [](SyncGroup& group) {
    const std::vector<int> ranks = {0, 1, 2};
    SharedArena arena(8_MiB);
    std::vector<Tensor> layers;
    for (std::uint64_t layer = 0; layer < 4; ++layer) {
      layers.push_back(arena.allocate(DType::u8, {1 << 20}));
      fill(layers.back().mutable_data(), layers.back().nbytes(), seed_of(group.rank(), layer));
    }
    const auto source = layers_of(4, [&](std::uint64_t layer) {
      return Config::object({{"w", layers[layer]}, {"index", layer}});
    });
    std::uint64_t taken = 0;
    const auto consume = [&](LayerPart& part) {
      RANK_CHECK(part.parts == 1 && part.slices.empty());
      for (const auto& [rank, config] : part.present())
        RANK_CHECK(is_pattern(config.at("w").as_tensor(), DType::u8, {1 << 20}, seed_of(rank, part.layer)));
      ++taken;
    };
    const StreamReport report =
        gather_each(source, ranks, group, consume, {.memory_budget = 64_KiB, .debugging = {.check_leases = true}});
    RANK_CHECK(report.arena_bytes == (group.rank() == 0 ? 2 : 1) * 4_MiB);
    RANK_CHECK(report.peak_slot_bytes == 0);
    RANK_CHECK(taken == (group.rank() == 0 ? 4 : 0));
    layers.clear();
    group.barrier();
    RANK_CHECK(arena.waiting_for_leases() == 0);
  });
}

TEST_CASE("two rounds per stream, and two more for the first one of a group; trim releases the senders' memory") {
  run_ranks(3, [](SyncGroup& group) {
    for (int first = 0; first < 3; ++first) {
      const auto ignore = [](LayerPart&) {};
      const StreamReport report = gather_each(layers_of(3, small_layer), ranks_from(first, 3), group, ignore);
      RANK_CHECK(report.rounds == (first == 0 ? 4 : 2));
      RANK_CHECK(report.route == Route::shm);
      RANK_CHECK((trim(group) != 0) == (group.rank() != first));
    }
  });
}

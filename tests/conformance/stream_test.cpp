// SPDX-License-Identifier: Apache-2.0
// Requirements for every stream: 1, 2, 4 and 7 ranks, each rank as root, layers of all kinds, in one part and in many.

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/hesitation.hpp"
#include "tests/support/random_config.hpp"

using namespace muster;
using namespace muster::test;

namespace {

/// Layers of every kind: nested values, scalars, empty tensors, all dtypes, absent layers.
Config layer_of_stream(int rank, std::uint64_t layer) {
  if ((static_cast<std::uint64_t>(rank) + layer) % 5 == 4) return {};
  Config config = Config::object({{"rank", rank},
                                  {"layer", layer},
                                  {"none", nullptr},
                                  {"empty", Config::object()},
                                  {"list", Config::array({1, 2.5, "x", nullptr, Config::array()})},
                                  {"scalar", pattern(DType::f64, {}, seed_of(rank, layer))},
                                  {"nothing", pattern(DType::f32, {3, 0, 2}, 1)}});
  const DType dtype = all_dtypes()[layer % all_dtypes().size()];
  config["w"] = pattern(dtype, {static_cast<std::int64_t>(layer % 3), 7}, seed_of(rank, layer));
  config["unequal"] = pattern(dtype, {rank + 1, 33}, seed_of(rank, layer) + 1);
  return config;
}

}  // namespace

TEST_CASE("each rank as root, layers of every kind, several streams of one group") {
  for (const int size : group_sizes) {
    CAPTURE(size);
    run_ranks(size, [&](Group& group) {
      for (int first = 0; first < size; ++first) {
        const StreamReport report = stream_and_check(group, ranks_from(first, size), 24, layer_of_stream);
        // A route may need one preflight.
        RANK_CHECK(report.rounds >= 2);
        RANK_CHECK(report.rounds <= (first == 0 ? 5 : 3));
        RANK_CHECK(report.route != Route::auto_);
        RANK_CHECK(!report.reason.empty());
      }
      RANK_CHECK(stream_and_check(group, ranks_from(0, size), 0, layer_of_stream).parts == 0);
    });
  }
}

TEST_CASE("a budget of 256 KiB and tensors of 5 MiB: parts and slices join into the same layer") {
  for (const int size : {1, 2, 4}) {
    CAPTURE(size);
    run_ranks(size, [&](Group& group) {
      const Model model = [](int rank, std::uint64_t layer) {
        const auto at = static_cast<std::size_t>(rank) * 3 + layer * 7;
        const DType dtype = all_dtypes()[at % all_dtypes().size()];
        const std::int64_t elements = (5 << 20) * 8 / bits(dtype);
        Config config = Config::object({{"index", layer}, {"norm", pattern(DType::f32, {257}, seed_of(rank, layer))}});
        config["mlp"]["up/down~"] = pattern(dtype, {elements / 1000, 1000}, seed_of(rank, layer));
        // One row is larger than a part.
        if (layer == 1) config["flat"] = pattern(dtype, {3, elements / 8 + 1}, seed_of(rank, layer) + 1);
        config["tail"] = pattern(DType::u8, {1000 * (rank + 1)}, seed_of(rank, layer) + 2);
        return config;
      };
      const StreamReport report =
          stream_and_check(group, ranks_from(size - 1, size), 3, model, {.memory_budget = 256_KiB});
      RANK_CHECK(report.part_bytes <= 256_KiB / 2);
      RANK_CHECK(report.parts > 3 * 5_MiB / report.part_bytes);
      RANK_CHECK(report.peak_slot_bytes <= 256_KiB);
      // The root holds parts from other hosts.
      if (report.route == Route::tcp && group.rank() == size - 1 && size > 1) RANK_CHECK(report.peak_slot_bytes != 0);
    });
  }
}

TEST_CASE("partners that are stopped and continued at any moment: every layer is complete") {
  for (const int slow : {0, 2}) {
    run_ranks(3, [&](Group& group) {
      std::optional<Hesitation> hesitation;
      if (group.rank() == 1) hesitation.emplace(group, slow);
      const Model model = [](int rank, std::uint64_t layer) -> Config {
        return pattern(DType::u8, {300'001}, seed_of(rank, layer));
      };
      stream_and_check(group, ranks_from(0, 3), 30, model, {.memory_budget = 1 << 20});
      hesitation.reset();
      group.barrier();
    });
  }
}

TEST_CASE("all dtypes cut by rows and flat, packed ones with odd rows") {
  run_ranks(3, [](Group& group) {
    const Model model = [](int rank, std::uint64_t layer) {
      const DType dtype = all_dtypes()[layer % all_dtypes().size()];
      return Config::object({{"rows", pattern(dtype, {501, 101}, seed_of(rank, layer))},
                             {"wide", pattern(dtype, {3, 60001}, seed_of(rank, layer) + 1)}});
    };
    stream_and_check(group, {0, 1, 2}, all_dtypes().size(), model, {.memory_budget = 64_KiB});
  });
}

TEST_CASE("strided sources, whole and cut, on senders and on the root") {
  run_ranks(3, [](Group& group) {
    const Model model = [](int rank, std::uint64_t layer) {
      const Tensor base = pattern(DType::f32, {300, 400}, seed_of(rank, layer));
      const auto strided = [&](const TensorView& view) { return Tensor(view, base.owner()); };
      // The rows of the last one are larger than a part.
      return Config::object({{"columns", strided(base.view().slice(1, 10, 300))},
                             {"transposed", strided(base.view().transposed())},
                             {"wide", strided(TensorView(DType::f32, {2, 300, 199}, base.data(), {200, 400, 1}))}});
    };
    for (const std::uint64_t budget : {64_KiB, 256_MiB})
      stream_and_check(group, {1, 2, 0}, 3, model, {.memory_budget = budget});
  });
}

TEST_CASE("layers of other sizes on each rank, random trees, depths of 1 to 5") {
  for (int depth = 1; depth <= 5; depth += 2) {
    run_ranks(4, [&](Group& group) {
      const Model model = [](int rank, std::uint64_t layer) {
        Config config = Config::object({{"tree", RandomConfig(seed_of(rank, layer)).tree(4)}});
        const auto bytes = static_cast<std::int64_t>((seed_of(rank, layer) * 7919) % 200000);
        config["w"] = pattern(DType::u8, {bytes}, seed_of(rank, layer));
        return config;
      };
      stream_and_check(group, {2, 0, 3, 1}, 30, model, {.memory_budget = 512_KiB, .pipeline_depth = depth});
    });
  }
}

TEST_CASE("budgets that grow and shrink between streams") {
  run_ranks(3, [](Group& group) {
    const Model model = [](int rank, std::uint64_t layer) {
      return Config::object({{"w", pattern(DType::u8, {300, 1000}, seed_of(rank, layer))}});
    };
    for (const std::uint64_t budget : {64_KiB, 8_MiB, 128_KiB, 128_KiB, 64_KiB}) {
      const StreamReport report = stream_and_check(group, {0, 1, 2}, 4, model, {.memory_budget = budget});
      RANK_CHECK(report.peak_slot_bytes <= (group.rank() == 0 ? budget : budget / 2));
    }
    (void)trim(group);
    RANK_CHECK(trim(group) == 0);
  });
}

TEST_CASE("disjoint lists with their own budgets, and ranks in no list") {
  run_ranks(7, [](Group& group) {
    const std::vector<std::vector<int>> lists = {{2, 0}, {5, 1, 6}, {4}};
    std::vector<int> mine;
    for (const auto& list : lists)
      if (std::ranges::find(list, group.rank()) != list.end()) mine = list;
    const std::uint64_t budget = mine.size() == 3 ? 128_KiB : 1_MiB;
    const Model model = [](int rank, std::uint64_t layer) {
      Config config = layer_of_stream(rank, layer);
      if (config.is_object()) config["large"] = pattern(DType::f16, {90, 999}, seed_of(rank, layer));
      return config;
    };
    for (int round = 0; round < 2; ++round) {
      const StreamReport report = stream_and_check(group, mine, 5 + 5 * mine.size(), model, {.memory_budget = budget});
      if (mine.empty()) RANK_CHECK(report.parts == 0);
    }
    // Rank 3 passes a list that it is not in.
    stream_and_check(group, {0, 1}, 3, model);
  });
}

TEST_CASE("arena tensors belong to the sender again when the stream has ended") {
  run_ranks(3, [](Group& group) {
    SharedArena arena(8_MiB);
    std::vector<Tensor> layers;
    for (std::uint64_t layer = 0; layer < 4; ++layer) {
      layers.push_back(arena.allocate(DType::u8, {1 << 20}));
      fill(layers.back().mutable_data(), layers.back().nbytes(), seed_of(group.rank(), layer));
    }
    const Model model = [&](int rank, std::uint64_t layer) {
      const Tensor w = rank == group.rank() ? layers[layer] : pattern(DType::u8, {1 << 20}, seed_of(rank, layer));
      return Config::object({{"w", w}, {"index", layer}});
    };
    stream_and_check(group, {0, 1, 2}, layers.size(), model,
                     {.memory_budget = 1_MiB, .debug = {.detect_writes = true}});
    layers.clear();
    group.barrier();
    RANK_CHECK(arena.waiting_for_leases() == 0);
  });
}

TEST_CASE("the root's own tensors are views of its own memory") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = pattern(DType::f32, {64, 1024}, 1);
    const auto source = layers_of(1, [&](std::uint64_t) { return Config::object({{"w", mine}}); });
    std::size_t at = 0;
    const auto consume = [&](LayerPart& part) {
      const Tensor& own = part.configs[0]->at("w").as_tensor();
      RANK_CHECK(own.data() == mine.data() + at);
      RANK_CHECK(part.configs[1]->at("w").as_tensor().shape() == own.shape());
      at += own.nbytes();
    };
    gather_each(source, std::vector<int>{0, 1}, group, consume, {.memory_budget = 64_KiB});
    RANK_CHECK(at == (group.rank() == 0 ? mine.nbytes() : 0));
  });
}

TEST_CASE("a layer whose descriptor is damaged in transit is never consumed, and all ranks get the error") {
  run_ranks(3, [](Group& group) {
    // A workspace has files instead of descriptors. workspace_gather_test.cpp damages them.
    if (group.kind() == "file") return;
    const std::vector<int> ranks = {1, 2, 0};
    for (int turn = 0; turn < 24; ++turn) {
      const int sender = turn % 2 * 2;
      // Bytes of the descriptors of several layers.
      std::optional<DamagedDescriptor> damage;
      if (group.rank() == sender) damage.emplace(turn / 2 % 4, static_cast<std::size_t>(turn / 2));
      error_of(ErrorKind::corrupt, {"data of rank " + std::to_string(sender)},
               [&] { stream_and_check(group, ranks, 8, layer_of_stream); });
      RANK_CHECK(!damage || damage->was_sent());
      damage.reset();
      stream_and_check(group, ranks, 2, layer_of_stream);
    }
  });
}

TEST_CASE("invalid arguments: all ranks get the same error, and the group remains usable") {
  run_ranks(3, [](Group& group) {
    const auto refused = [&](ErrorKind kind, const std::string& part, const std::function<void()>& call) {
      error_of(kind, {part}, call);
      stream_and_check(group, {0, 1, 2}, 2, layer_of_stream);
    };
    const std::vector<int> all = {0, 1, 2};
    const LayerSource none = [] { return std::nullopt; };
    const LayerConsumer ignore = [](LayerPart&) {};
    const bool is_one = group.rank() == 1;
    refused(ErrorKind::invalid_argument, "at least 32768",
            [&] { gather_each(none, all, group, ignore, {.memory_budget = 100}); });
    refused(ErrorKind::invalid_argument, "pipeline_depth",
            [&] { gather_each(none, all, group, ignore, {.pipeline_depth = is_one ? 0 : 2}); });
    refused(ErrorKind::invalid_argument, "source",
            [&] { gather_each(is_one ? LayerSource() : none, all, group, ignore); });
    refused(ErrorKind::invalid_argument, "consumer", [&] { gather_each(none, all, group, {}); });
    refused(ErrorKind::invalid_argument, "twice", [&] { gather_each(none, std::vector<int>{0, 0}, group, ignore); });
    refused(ErrorKind::rank_mismatch, "rank 1 [0, 1]", [&] {
      gather_each(none, is_one ? std::vector<int>{0, 1} : all, group, ignore);
    });
    refused(ErrorKind::rank_mismatch, "rank 1 memory_budget 1048576, pipeline_depth 2",
            [&] { gather_each(none, all, group, ignore, {.memory_budget = is_one ? 1_MiB : 2_MiB}); });
    refused(ErrorKind::rank_mismatch, "rank 1 get_configs_parallel", [&] {
      if (is_one)
        (void)get_configs_parallel(nullptr, std::vector<int>{1}, group);
      else
        gather_each(none, std::vector<int>{0, 2}, group, ignore);
    });
    refused(ErrorKind::invalid_argument, "not valid UTF-8", [&] {
      int given = 0;
      gather_each([&]() -> std::optional<Config> { return given++ == 2 ? Config("\xff") : Config("x"); }, all, group,
                  ignore);
    });
  });
}

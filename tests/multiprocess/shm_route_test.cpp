// SPDX-License-Identifier: Apache-2.0
// Properties of the shared-memory route beyond those of every route: leases, slots and their pool, arenas that are not
// copied, and no repeated setup cost from the third exchange on.

#include "doctest/doctest.h"
#include "muster/shared_arena.hpp"
#include "tests/support/exchanges.hpp"

using namespace muster;
using namespace muster::test;

TEST_CASE("a result is indexed by position, and by_rank() finds ranks") {
  run_ranks(3, [](Group& group) {
    const Config mine = group.rank() == 1 ? Config(nullptr) : Config(group.rank());
    GatheredConfigs all = get_configs_parallel(group.rank() == 1 ? nullptr : &mine, {2, 0, 1}, group);
    if (group.rank() == 2) {
      RANK_CHECK((all[0]->as_int() == 2 && all[1]->as_int() == 0 && !all[2]));
      RANK_CHECK((all.by_rank(2)->as_int() == 2 && all.by_rank(0)->as_int() == 0 && !all.by_rank(1)));
      error_of(ErrorKind::invalid_argument, {"rank 3 has no entry here", "the list is [2, 0, 1]"},
               [&] { (void)all.by_rank(3); });
      RANK_CHECK(std::move(all).by_rank(0)->as_int() == 0);
    } else {
      error_of(ErrorKind::invalid_argument, {"rank 2 has no entry here", "only the root has entries"},
               [&] { (void)all.by_rank(2); });
    }
  });
}

TEST_CASE("a sender can wait until it is released") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {5000}, seed_of(group.rank(), 0));
    GatheredTensors all = get_tensors_parallel(mine, std::vector<int>{0, 1}, group);
    if (group.rank() == 1) {
      RANK_CHECK(!all.wait_released(std::chrono::milliseconds(50)));
      group.barrier();
      RANK_CHECK(all.wait_released(std::chrono::seconds(10)));
    } else {
      group.barrier();
      all.release();
    }
    group.barrier();
  });
}

TEST_CASE(
    "if a root keeps results until the budget is used up, all ranks get a clear error; after a release the group "
    "works") {
  run_ranks(3, [](Group& group) {
    std::vector<GatheredTensors> kept;
    const GatherOptions options{.root_tensors = RootTensors::copy, .memory_budget = 4 << 20};
    const Tensor mine = pattern(DType::u8, {1 << 20}, seed_of(group.rank(), 0));
    error_of(ErrorKind::out_of_space, {"rank 0 holds 3 results"}, [&] {
      for (int round = 0; round < 8; ++round)
        kept.push_back(get_tensors_parallel(mine, ranks_from(0, 3), group, options));
    });
    RANK_CHECK(kept.size() == 3);
    kept.clear();
    group.barrier();
    gather_and_check(group, ranks_from(0, 3), 1 << 20, 5, options);
  });
}

TEST_CASE("arena tensors are not copied, and are leased until the result ends") {
  run_ranks(3, [](Group& group) {
    SharedArena arena(8 << 20);
    for (int round = 0; round < 5; ++round) {
      std::optional<Tensor> mine = arena.allocate(DType::f32, {200000});
      fill(mine->mutable_data(), mine->nbytes(), seed_of(group.rank(), round));
      {
        const GatheredTensors all =
            get_tensors_parallel(*mine, ranks_from(0, 3), group, {.debug = {.detect_writes = true}});
        // At the first exchange the root must map the arena.
        RANK_CHECK(all.report().rounds == (round == 0 ? 2 : 1));
        for (const auto& [rank, tensor] : all.present())
          RANK_CHECK(is_pattern(tensor, DType::f32, {200000}, seed_of(rank, round)));
        if (group.rank() == 0) RANK_CHECK(all.report().arena_bytes == 2 * 800000);
        const std::uint64_t before = arena.available();
        mine.reset();
        if (group.rank() != 0) {
          // Memory that is freed while leased is not reused.
          RANK_CHECK(arena.available() == before);
          RANK_CHECK(arena.waiting_for_leases() >= 800000);
        }
        group.barrier();
      }
      group.barrier();
      RANK_CHECK(arena.waiting_for_leases() == 0);
    }
  });
}

TEST_CASE("results over shared memory are writable on request, and arenas are not") {
  run_ranks(3, [](Group& group) {
    SharedArena arena(1 << 20);
    const Tensor lent = arena.allocate(DType::u8, {1000});
    fill(lent.mutable_data(), lent.nbytes(), seed_of(group.rank(), 1));
    std::optional<GatheredConfigs> kept;
    for (const std::int64_t bytes : {5000, 3 << 20})
      for (const bool writable : {false, true, true, false}) {
        const Tensor mine = pattern(DType::u8, {bytes}, seed_of(group.rank(), 0));
        Config config;
        config["moved"] = mine;
        config["lent"] = lent;
        GatheredConfigs all = get_configs_parallel(&config, ranks_from(0, 3), group,
                                                   {.root_tensors = RootTensors::copy, .writable = writable});
        for (const auto& [rank, each] : all.present()) {
          const Tensor& moved = each.at("moved").as_tensor();
          RANK_CHECK(is_pattern(moved, DType::u8, {bytes}, seed_of(rank, 0)));
          if (rank == group.rank()) continue;
          RANK_CHECK(moved.is_writable() == writable);
          RANK_CHECK(!each.at("lent").as_tensor().is_writable());
          if (writable) fill(moved.mutable_data(), moved.nbytes(), seed_of(rank, 7));
        }
        group.barrier();
        RANK_CHECK(is_pattern(mine, DType::u8, {bytes}, seed_of(group.rank(), 0)));
        // The next exchange does not overwrite a held result.
        if (kept && writable)
          for (const auto& [rank, each] : kept->present())
            if (rank != group.rank() && each.at("moved").as_tensor().is_writable())
              RANK_CHECK(is_pattern(each.at("moved").as_tensor(), DType::u8, each.at("moved").as_tensor().shape(),
                                    seed_of(rank, 7)));
        kept = std::move(all);
      }
  });
}

TEST_CASE("a small exchange over mapped slots needs one round") {
  // Held results keep their bytes meanwhile. One result may have parts of an arena and of a slot.
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 3);
    SharedArena arena(1 << 20);
    const Tensor lent = arena.allocate(DType::u8, {1000});
    fill(lent.mutable_data(), lent.nbytes(), seed_of(group.rank(), 99));
    const auto value_of = [&](int rank, int round) {
      const Tensor wide = pattern(DType::u16, {60, 50}, seed_of(rank, round));
      return Config::object({{"round", round},
                             {"whole", pattern(DType::u8, {300}, seed_of(rank, round))},
                             {"strided", Tensor(TensorView(DType::u16, {60, 20}, wide.data(), {50, 1}), wide.owner())},
                             {"lent", rank == group.rank() ? lent : pattern(DType::u8, {1000}, seed_of(rank, 99))}});
    };
    for (const RootTensors own : {RootTensors::borrow, RootTensors::copy}) {
      std::optional<GatheredConfigs> held;
      for (int round = 0; round < 9; ++round) {
        const Config mine = value_of(group.rank(), round);
        GatheredConfigs all = get_configs_parallel(&mine, ranks, group, {.root_tensors = own});
        // Two slots are made: the second while the first one is held.
        if (own == RootTensors::copy || round >= 2) RANK_CHECK(all.report().rounds == 1);
        for (const auto& [rank, config] : all.present()) RANK_CHECK(config == value_of(rank, round));
        if (held)
          for (const auto& [rank, config] : held->present()) RANK_CHECK(config == value_of(rank, round - 1));
        held.reset();
        if (round % 2 == 0) held.emplace(std::move(all));
        group.barrier();
      }
    }
  });
}

TEST_CASE("data written before a refused round is not read, and the next exchange has its own bytes") {
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 3);
    for (int round = 0; round < 3; ++round) gather_and_check(group, ranks, 5000, round);
    for (int round = 3; round < 12; round += 3) {
      const std::int64_t bytes = group.rank() == round / 3 - 1 ? 6000 : 5000;
      error_of(ErrorKind::rank_mismatch, {}, [&] { gather_and_check(group, ranks, bytes, round); });
      gather_and_check(group, ranks, 4000, round + 1);
      gather_and_check(group, ranks, 5000, round + 2);
    }
  });
}

TEST_CASE("trim frees a sender's unused slots, and the root has none") {
  run_ranks(3, [](Group& group) {
    for (int round = 0; round < 3; ++round) {
      gather_and_check(group, ranks_from(0, 3), 5 << 20, round);
      group.barrier();
      RANK_CHECK((trim(group) == 0) == (group.rank() == 0));
    }
    merge_and_check(group, ranks_from(0, 3), merge::concat(0), patterns(DType::u8, {1 << 20}, 3));
    RANK_CHECK((trim(group) != 0) == (group.rank() == 0));
  });
}

TEST_CASE("the memory budget, the pool limit and the depth of the root apply to merges") {
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = ranks_from(0, 3);
    const Tensor mine = pattern(DType::u8, {1 << 20}, seed_of(group.rank(), 0));
    const GatherOptions tight{.memory_budget = 2 << 20};
    error_of(ErrorKind::out_of_space, {"memory budget", "rank 0"},
             [&] { (void)merge_tensor_parallel(mine, merge::concat(0), ranks, group, tight); });
    // The root's estimate exceeds the budget, but the actual size does not.
    const GatherOptions enough{.memory_budget = 4 << 20};
    const auto most_of_it = [](int rank) { return pattern(DType::u8, {rank == 0 ? 3 << 20 : 100}, seed_of(rank, 4)); };
    merge_and_check(group, ranks, merge::concat(0), most_of_it, enough);
    (void)trim(group);
    std::vector<MergeResult> kept;
    kept.push_back(merge_tensor_parallel(mine, merge::concat(0), ranks, group, enough));
    error_of(ErrorKind::out_of_space, {"holds 1 result of"},
             [&] { (void)merge_tensor_parallel(mine, merge::concat(0), ranks, group, enough); });
    kept.clear();
    group.barrier();
    merge_and_check(group, ranks, merge::concat(0), patterns(DType::u8, {1 << 20}, 5), enough);
    // Another list uses its own slot. The pool limit does not allow the first list's slot to be kept.
    const MergeResult other =
        merge_tensor_parallel(mine, merge::sum(), std::vector<int>{0, 1}, group, {.pool_limit = 0});
    if (group.rank() == 0) RANK_CHECK(other.report().pool_bytes < (6 << 20));
  });
}

TEST_CASE("from the third exchange on there are two rounds and no page fault") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::bf16, {512, 2048}, seed_of(group.rank(), 0));
    for (const Merge& merge : {merge::concat(0), merge::concat(1), merge::stack(), merge::sum()}) {
      for (int round = 0; round < 6; ++round) {
        const MergeResult merged = merge_tensor_parallel(mine, merge, ranks_from(0, 4), group);
        RANK_CHECK(merged.report().rounds == 2);
        RANK_CHECK(merged.report().route == Route::shm);
        RANK_CHECK(merged.report().payload_bytes == 8 << 20);
        RANK_CHECK(merged.explain().find("merge") != std::string::npos);
        std::uint64_t faults = 0;
        for (const PhaseReport& phase : merged.report().phases)
          if (phase.name == "merge") faults = phase.page_faults;
        // The heap causes a few faults, and more under a sanitizer. The merged tensor has 2048 pages, and each rank's
        // tensor 512.
        if (round >= 2 && faults > 128)
          throw RankFailure(std::string(merge_name(merge)) + ": " + std::to_string(faults) + " page faults");
      }
    }
  });
}

// SPDX-License-Identifier: Apache-2.0
// Requirements for every gather, over every group and route: 1, 2, 4 and 7 ranks, each rank as root.

#include "muster/gather.hpp"

#include <optional>
#include <string>
#include <thread>

#include "doctest/doctest.h"
#include "muster/interrupt.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/hesitation.hpp"

using namespace muster;
using namespace muster::test;

namespace {

Config layer_of(int rank, int leaves) {
  Config layer = Config::object({{"rank", rank},
                                 {"name", "layer"},
                                 {"empty", Config::object()},
                                 {"list", Config::array({1, 2.5, "x", nullptr})}});
  for (int i = 0; i < leaves; ++i) {
    Config& leaf = layer["leaf" + std::to_string(i)];
    leaf["scale"] = 0.5 * i;
    if (i % 2 == 0) leaf["weight"] = pattern(DType::bf16, {i % 5, 7}, seed_of(rank, i));
  }
  return layer;
}

}  // namespace

TEST_CASE("each rank as root, one tensor per rank") {
  for (const int size : group_sizes) {
    CAPTURE(size);
    run_ranks(size, [&](Group& group) {
      for (int first = 0; first < size; ++first)
        for (int round = 0; round < 4; ++round)
          gather_and_check(group, ranks_from(first, size), DType::f32, {33, 1 + 100 * round}, round);
    });
  }
}

TEST_CASE("all dtypes, empty and scalar tensors") {
  run_ranks(4, [](Group& group) {
    int round = 0;
    for (const DType dtype : all_dtypes())
      for (const Shape& shape : {Shape{}, Shape{0}, Shape{3, 0, 2}, Shape{6, 4}, Shape{1000, 66}}) {
        ++round;
        gather_and_check(group, ranks_from(round % 4, 4), dtype, shape, round);
      }
  });
}

TEST_CASE("results in the caller's tensors: the caller owns them afterwards, and the senders' memory is free") {
  for (const int size : group_sizes) {
    CAPTURE(size);
    run_ranks(size, [&](Group& group) {
      const std::vector<int> ranks = ranks_from(size / 2, size);
      for (const Shape& shape : {Shape{0}, Shape{33}, Shape{700, 900}}) {
        GatherOptions options;
        if (group.rank() == ranks.front())
          for (int i = 0; i < size; ++i) options.into.push_back(Tensor::allocate(DType::f32, shape));
        for (int round = 0; round < 3; ++round) {
          const Tensor mine = pattern(DType::f32, shape, seed_of(group.rank(), round));
          const GatheredTensors all = get_tensors_parallel(mine, ranks, group, options);
          group.barrier();
          RANK_CHECK(all.wait_released(std::chrono::milliseconds(0)));
          for (std::size_t i = 0; i < all.size(); ++i) {
            RANK_CHECK(all[i]->data() == options.into[i].data());
            RANK_CHECK(is_pattern(options.into[i], DType::f32, shape, seed_of(ranks[i], round)));
          }
        }
      }
    });
  }
}

TEST_CASE(
    "a result that does not fit into the caller's tensors is an error on all ranks, and the group remains usable") {
  run_ranks(3, [](Group& group) {
    const std::vector<int> ranks = {0, 1, 2};
    const Tensor mine = pattern(DType::f32, {4, 5}, seed_of(group.rank(), 0));
    const auto room = [](const Shape& shape) { return Tensor::allocate(DType::f32, shape); };
    const std::vector<Tensor> fits = {room({4, 5}), room({4, 5}), room({4, 5})};
    const std::vector<std::pair<std::vector<Tensor>, std::string>> bad = {
        {{room({4, 5})}, "expected 3 tensors, received 1"},
        {{room({4, 5}), room({5, 4}), room({4, 5})}, "tensor 1 is F32 [5, 4], but the result is F32 [4, 5]"},
        {{room({4, 5}), Tensor::borrow(mine), room({4, 5})}, "tensor 1 must be writable"},
    };
    for (const auto& [into, words] : bad) {
      GatherOptions options;
      if (group.rank() == 0) options.into = into;
      fails_alike(group, ErrorKind::invalid_argument, {words},
                  [&] { get_tensors_parallel(mine, ranks, group, options); });
    }
    const Config config;
    GatherOptions options;
    if (group.rank() == 0) options.into = fits;
    fails_alike(group, ErrorKind::invalid_argument, {"not gathers of configs"},
                [&] { get_configs_parallel(&config, ranks, group, options); });
  });
}

TEST_CASE("strided sources arrive contiguous") {
  run_ranks(4, [](Group& group) {
    const std::vector<int> ranks = ranks_from(1, 4);
    for (int round = 0; round < 3; ++round) {
      const Tensor whole = pattern(DType::f32, {60, 90}, seed_of(group.rank(), round));
      const TensorView mine = whole.view().slice(1, 10, 50).transposed();
      const GatheredTensors all = get_tensors_parallel(mine, ranks, group);
      for (const auto& [rank, tensor] : all.present()) {
        const Tensor other = pattern(DType::f32, {60, 90}, seed_of(rank, round));
        RANK_CHECK(bitwise_equal(tensor, other.view().slice(1, 10, 50).transposed()));
        if (rank != group.rank()) RANK_CHECK(tensor.view().is_contiguous());
      }
    }
  });
}

TEST_CASE("nested configs with and without tensors, absent configs keep their positions") {
  for (const int size : group_sizes) {
    run_ranks(size, [&](Group& group) {
      for (int round = 0; round < 6; ++round) {
        const std::vector<int> ranks = ranks_from(round % size, size);
        const Config mine = layer_of(group.rank(), round * 10);
        const auto is_absent = [&](int rank) { return (rank + round) % 3 == 0; };
        const GatheredConfigs all =
            get_configs_parallel(is_absent(group.rank()) ? nullptr : &mine, ranks, group,
                                 {.root_tensors = round % 2 == 0 ? RootTensors::borrow : RootTensors::copy});
        if (group.rank() != ranks.front()) {
          RANK_CHECK(all.empty());
          continue;
        }
        RANK_CHECK(all.size() == ranks.size());
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          RANK_CHECK(all[i].has_value() == !is_absent(ranks[i]));
          if (all[i]) RANK_CHECK(*all[i] == layer_of(ranks[i], round * 10));
        }
      }
    });
  }
}

TEST_CASE("a discarded result still returns its values, and an index past its end is refused") {
  run_ranks(3, [](Group& group) {
    const Config mine = layer_of(group.rank(), 4);
    std::size_t seen = 0;
    for (const auto& [rank, config] : get_configs_parallel(&mine, ranks_from(0, 3), group).present()) {
      RANK_CHECK(config == layer_of(rank, 4));
      ++seen;
    }
    RANK_CHECK(seen == (group.rank() == 0 ? 3 : 0));
    const GatheredConfigs all = get_configs_parallel(&mine, ranks_from(0, 3), group);
    error_of(ErrorKind::invalid_argument, {}, [&] { (void)all[3]; });
  });
}

TEST_CASE("a config of 20,000 leaves") {
  run_ranks(4, [](Group& group) {
    const Config mine = layer_of(group.rank(), 10000);
    for (int round = 0; round < 2; ++round) {
      const GatheredConfigs all = get_configs_parallel(&mine, ranks_from(0, 4), group);
      for (const auto& [rank, config] : all.present()) RANK_CHECK(config == layer_of(rank, 10000));
    }
  });
}

TEST_CASE("unequal tensors are refused on every rank, with the dtype and shape of each, and the group remains usable") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = group.rank() == 2 ? pattern(DType::f16, {4, 9}, 1) : pattern(DType::f32, {4, 8}, 1);
    error_of(ErrorKind::rank_mismatch, {"rank 2 F16 [4, 9]", "rank 0 F32 [4, 8]"},
             [&] { (void)get_tensors_parallel(mine, ranks_from(0, 4), group); });
    gather_and_check(group, ranks_from(3, 4), DType::i64, {5}, 1);
    // Ranks in no list, and ranks that gather configs and have none, receive the same error.
    error_of(ErrorKind::rank_mismatch, {"rank 2 F16 [4, 9]", "rank 0 F32 [4, 8]"}, [&] {
      if (group.rank() == 3)
        (void)get_configs_parallel(nullptr, std::vector{3}, group);
      else
        (void)get_tensors_parallel(mine, std::vector{0, 2}, group);
    });
    gather_and_check(group, ranks_from(3, 4), DType::i64, {5}, 2);
  });
}

TEST_CASE("a descriptor damaged in transit, in any byte, is an error on every rank, and the group remains usable") {
  for (const std::int64_t rows : {1, 3000}) {  // with the descriptor and without it
    run_ranks(3, [&](Group& group) {
      // A workspace has files instead of descriptors. workspace_gather_test.cpp damages them.
      if (group.kind() == "file") return;
      const std::vector<int> ranks = ranks_from(1, 3);
      Config mine = Config::object({{"number", group.rank()}, {"name", "a layer"}});
      mine["weight"] = pattern(DType::u8, {rows, 100}, seed_of(group.rank(), 0));
      // One of these ranks may be on another host than the root.
      for (int turn = 0; turn < 80; ++turn) {
        const int sender = turn % 2 * 2;
        std::optional<DamagedDescriptor> damage;
        if (group.rank() == sender) damage.emplace(0, static_cast<std::size_t>(turn / 2));
        fails_alike(group, ErrorKind::corrupt, {"data of rank " + std::to_string(sender)},
                    [&] { (void)get_configs_parallel(&mine, ranks, group); });
        RANK_CHECK(!damage || damage->was_sent());
      }
    });
  }
}

TEST_CASE("lengths around each limit of a route, odd and even, and exact fits") {
  run_ranks(3, [](Group& group) {
    for (const std::int64_t limit : {64, 1024, 4096, 65536, 256 * 1024, 1 << 20})
      for (const std::int64_t bytes : {limit - 1, limit, limit + 1})
        gather_and_check(group, ranks_from(bytes % 3, 3), bytes, static_cast<std::uint64_t>(bytes));
  });
}

TEST_CASE("a sender or the root that is stopped and continued at any moment changes no byte") {
  for (const int slow : {0, 2}) {
    run_ranks(3, [&](Group& group) {
      std::optional<Hesitation> hesitation;
      if (group.rank() == 1) hesitation.emplace(group, slow);
      for (int round = 0; round < 20; ++round)
        gather_and_check(group, ranks_from(0, 3), round % 2 == 0 ? 30'000 : 3'000'000, round);
      hesitation.reset();
      group.barrier();
    });
  }
}

TEST_CASE("three lists at once, one of them with a single rank, and ranks in no list") {
  run_ranks(7, [](Group& group) {
    const std::vector<std::vector<int>> lists = {{1, 0, 4}, {5, 2}, {3}};
    for (int round = 0; round < 5; ++round) {
      const std::vector<int>* mine = nullptr;
      for (const auto& list : lists)
        if (std::ranges::find(list, group.rank()) != list.end()) mine = &list;
      if (mine != nullptr) {
        gather_and_check(group, *mine, DType::u8, {1 + 5000 * round}, round);
      } else {
        const Tensor unused = pattern(DType::f32, {1}, 0);
        // A rank in no list may pass an empty list or a list of other ranks: both mean the same.
        const std::vector<int> none = round % 2 == 0 ? std::vector<int>{} : lists[0];
        RANK_CHECK(get_tensors_parallel(unused, none, group).empty());
      }
    }
  });
}

TEST_CASE("different, overlapping, duplicate and invalid lists are errors on all ranks, and the group remains usable") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {100}, seed_of(group.rank(), 0));
    const auto refused = [&](std::vector<int> list) {
      const ErrorKind kind = error_of([&] { (void)get_tensors_parallel(mine, list, group); }).kind();
      return kind == ErrorKind::rank_mismatch || kind == ErrorKind::invalid_argument;
    };
    RANK_CHECK(refused(group.rank() == 1 ? std::vector<int>{1, 0, 2, 3} : std::vector<int>{0, 1, 2, 3}));
    RANK_CHECK(refused(group.rank() < 2 ? std::vector<int>{0, 1, 2} : std::vector<int>{2, 3}));
    RANK_CHECK(refused(group.rank() == 3 ? std::vector<int>{0, 3, 3} : std::vector<int>{0, 1, 2}));
    RANK_CHECK(refused(group.rank() == 3 ? std::vector<int>{3, 17} : std::vector<int>{0, 1, 2}));
    gather_and_check(group, ranks_from(0, 4), DType::u8, {100}, 0);
  });
}

TEST_CASE("a call of another kind is an error on all ranks of the list") {
  run_ranks(3, [](Group& group) {
    const Config config = layer_of(group.rank(), 2);
    const Tensor tensor = pattern(DType::u8, {3}, 1);
    error_of(ErrorKind::rank_mismatch, {}, [&] {
      if (group.rank() == 1)
        (void)get_configs_parallel(&config, ranks_from(0, 3), group);
      else
        (void)get_tensors_parallel(tensor, ranks_from(0, 3), group);
    });
  });
}

TEST_CASE("results stay readable until they are released, even if other ranks continue or exit") {
  run_ranks(3, [](Group& group) {
    std::vector<GatheredTensors> kept;
    for (int round = 0; round < 6; ++round) {
      const Tensor mine = pattern(DType::f32, {1000 + round}, seed_of(group.rank(), round));
      // The root's own tensor must live as long as the result, unless it is copied.
      kept.push_back(get_tensors_parallel(mine, ranks_from(0, 3), group, {.root_tensors = RootTensors::copy}));
    }
    for (int round = 0; round < 6; ++round)
      for (const auto& [rank, tensor] : kept[static_cast<std::size_t>(round)].present())
        RANK_CHECK(is_pattern(tensor, DType::f32, {1000 + round}, seed_of(rank, round)));
  });
}

TEST_CASE("tensors copied out of a result outlive it and the group") {
  const GroupOf group(2);
  run_processes(2, [&](int rank) {
    auto mine = group.join(rank);
    std::optional<Tensor> kept;
    {
      const Tensor tensor = pattern(DType::u8, {300000}, seed_of(rank, 1));
      GatheredTensors all = get_tensors_parallel(tensor, std::vector<int>{0, 1}, *mine);
      if (rank == 0) kept = *all[1];
      all.release();
      RANK_CHECK(all.empty());
    }
    for (int round = 2; round < 6; ++round) gather_and_check(*mine, {0, 1}, DType::u8, {300000}, round);
    mine.reset();
    if (kept) RANK_CHECK(is_pattern(*kept, DType::u8, {300000}, seed_of(1, 1)));
  });
}

TEST_CASE("a rank that waits for a release is notified") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {100000}, seed_of(group.rank(), 0));
    GatheredTensors all = get_tensors_parallel(mine, std::vector<int>{0, 1}, group);
    all.release();
    RANK_CHECK(all.empty());
    RANK_CHECK(all.wait_released(std::chrono::seconds(10)));
    group.barrier();
  });
}

TEST_CASE("arena tensors can be moved with the result") {
  run_ranks(3, [](Group& group) {
    SharedArena arena(4 << 20);
    for (int round = 0; round < 3; ++round) {
      std::optional<Tensor> mine = arena.allocate(DType::f32, {200000});
      fill(mine->mutable_data(), mine->nbytes(), seed_of(group.rank(), round));
      {
        const GatheredTensors all =
            get_tensors_parallel(*mine, ranks_from(0, 3), group, {.debug = {.detect_writes = true}});
        for (const auto& [rank, tensor] : all.present())
          RANK_CHECK(is_pattern(tensor, DType::f32, {200000}, seed_of(rank, round)));
        mine.reset();
        group.barrier();
      }
      group.barrier();
      RANK_CHECK(arena.waiting_for_leases() == 0);
    }
  });
}

TEST_CASE("the report tells route, bytes and rounds") {
  run_ranks(2, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {2 << 20}, seed_of(group.rank(), 0));
    const GatheredTensors all = get_tensors_parallel(mine, std::vector<int>{0, 1}, group);
    const ExchangeReport& report = all.report();
    RANK_CHECK(report.payload_bytes == 4 << 20);
    RANK_CHECK(report.rounds >= 2);
    RANK_CHECK(!report.reason.empty());
    RANK_CHECK(all.explain().find("route " + std::string(to_string(report.route))) != std::string::npos);
    std::uint64_t moved = 0;
    for (const PhaseReport& phase : report.phases) moved += phase.bytes;
    RANK_CHECK((moved != 0) == (group.rank() == 1));
    if (report.route != Route::shm) return;
    RANK_CHECK(report.rounds == 2);
    for (const PhaseReport& phase : report.phases)
      if (phase.name == "copy") RANK_CHECK(phase.bytes == 2 << 20 && phase.copies == 1);
    RANK_CHECK((group.rank() == 1) == (report.pool_bytes != 0));
  });
}

TEST_CASE("a gather inside a gather") {
  run_ranks(3, [](Group& group) {
    const Tensor outer = pattern(DType::f32, {4000}, seed_of(group.rank(), 1));
    const GatheredTensors all = get_tensors_parallel(outer, ranks_from(0, 3), group);
    gather_and_check(group, ranks_from(0, 3), DType::f32, {4000}, 2);
    for (const auto& [rank, tensor] : all.present())
      RANK_CHECK(is_pattern(tensor, DType::f32, {4000}, seed_of(rank, 1)));
  });
}

TEST_CASE("arena and ordinary tensors in one config") {
  run_ranks(4, [](Group& group) {
    SharedArena arena(1 << 20);
    SharedArena other(1 << 20);
    for (int round = 0; round < 4; ++round) {
      Config mine = layer_of(group.rank(), 8);
      int i = 0;
      for (SharedArena* each : {&arena, &other}) {
        Tensor tensor = each->allocate(DType::i32, {100, 10});
        fill(tensor.mutable_data(), tensor.nbytes(), seed_of(group.rank(), 50 + i));
        mine["arena" + std::to_string(i++)] = tensor;
      }
      const GatheredConfigs all = get_configs_parallel(&mine, ranks_from(round, 4), group);
      for (const auto& [rank, config] : all.present()) {
        RANK_CHECK(config.at("leaf6") == layer_of(rank, 8).at("leaf6"));
        for (int k = 0; k < 2; ++k)
          RANK_CHECK(is_pattern(config.at("arena" + std::to_string(k)).as_tensor(), DType::i32, {100, 10},
                                seed_of(rank, 50 + k)));
      }
    }
  });
}

TEST_CASE("growing, shrinking and trimmed exchanges") {
  run_ranks(3, [](Group& group) {
    int round = 0;
    for (const std::int64_t bytes : {1, 5 << 20, 100, 3 << 20, 9 << 20, 9 << 20, 70000, 1}) {
      gather_and_check(group, ranks_from(0, 3), DType::u8, {bytes}, ++round);
      group.barrier();
      if (round % 3 == 0) (void)trim(group);
      gather_and_check(group, ranks_from(0, 3), DType::u8, {bytes}, ++round, {.pool_limit = 1 << 20});
    }
  });
}

TEST_CASE("the longest timeout that can be expressed never expires") {
  run_ranks(3, [](Group& group) {
    constexpr auto for_ever = std::chrono::milliseconds::max();
    const auto be_late = [&] {
      if (group.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    };
    be_late();
    gather_and_check(group, ranks_from(0, 3), DType::u8, {100000}, 0, {.timeout = for_ever});
    be_late();
    group.barrier({.timeout = for_ever});
    group.set_timeout(for_ever);
    be_late();
    gather_and_check(group, ranks_from(2, 3), DType::u8, {100000}, 1);
    be_late();
    if (group.rank() == 2) group.send(0, std::array<std::byte, 3>{});
    if (group.rank() == 0) RANK_CHECK(group.receive(2, 3).size() == 3);
  });
}

TEST_CASE("the caller's own messages in flight do not mix with those of an exchange") {
  run_ranks(4, [](Group& group) {
    const auto word = [](int from, int to) { return static_cast<std::byte>(10 * from + to); };
    const int rank = group.rank();
    for (int other = 0; other < 4; ++other)
      if (other != rank) group.send(other, std::array{word(rank, other)});
    for (int first = 0; first < 4; ++first) {
      gather_and_check(group, ranks_from(first, 4), DType::u8, {5}, first);
      gather_and_check(group, ranks_from(first, 4), DType::u8, {3 << 20}, first + 10);
    }
    for (int other = 0; other < 4; ++other) {
      if (other == rank) continue;
      const std::vector<std::byte> message = group.receive(other, 1);
      RANK_CHECK(message.size() == 1 && message.front() == word(other, rank));
    }
  });
}

TEST_CASE("an interrupted program ends its wait, and the other ranks receive the error") {
  run_ranks(2, [](Group& group) {
    if (group.rank() == 0) set_interrupt_hook([]() noexcept { return true; });
    error_of(ErrorKind::cancelled, {"rank 0", "interrupted"}, [&] {
      if (group.rank() == 0) group.barrier();
      // This message never arrives: only the failure of the group ends the wait.
      const int first = 0;
      group.wait_until([] { return false; },
                       [](std::chrono::nanoseconds longest) { std::this_thread::sleep_for(longest); }, {&first, 1});
    });
    // The other rank is a started program, which runs the following cases as well.
    set_interrupt_hook(nullptr);
  });
}

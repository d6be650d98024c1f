// SPDX-License-Identifier: Apache-2.0
// Properties of the MPI route beyond those of every route: memory of the root, lists across hosts, and ranks that fail,
// die or stop while pieces are in flight. Uses two hosts (MUSTER_TEST_GROUP=mpi-2): ranks 0 and 1, and ranks 2 and 3.

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/merge_gather.hpp"
#include "muster/shared_arena.hpp"
#include "src/os/fault.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/kills.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

/// Returns the bytes of this process's address space in use.
std::uint64_t address_space() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::uint64_t pool_of(const ExchangeResult& result) {
  return result.report().pool_bytes;
}

}  // namespace

TEST_CASE("the report names the ranks that used MPI and those that used shared memory") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {1 << 20}, seed_of(group.rank(), 0));
    for (const int first : {0, 3}) {
      const GatheredTensors all = get_tensors_parallel(mine, ranks_from(first, 4), group);
      const ExchangeReport& report = all.report();
      RANK_CHECK(report.route == Route::mpi);
      RANK_CHECK(report.rounds == 2);
      RANK_CHECK(report.payload_bytes == 4 << 20);
      const bool is_far = group.host_of(group.rank()) != group.host_of(first);
      RANK_CHECK(report.network_bytes == (group.rank() == first ? 2 << 20 : is_far ? 1 << 20 : 0));
      RANK_CHECK((all.explain().find(" of them by MPI") != std::string::npos) == (report.network_bytes != 0));
      RANK_CHECK(all.explain().find("several hosts") != std::string::npos);
      bool has_sent = false;
      for (const PhaseReport& phase : report.phases)
        has_sent = has_sent || (phase.name == "send" && phase.bytes == 1 << 20 && phase.copies == 0);
      RANK_CHECK(has_sent == is_far);
    }
  });
}

TEST_CASE("lists across hosts, with roots on different hosts, in one exchange") {
  run_ranks(6, [](Group& group) {
    const std::vector<std::vector<int>> lists = {{5, 0, 1}, {2, 4}, {3}};
    for (int round = 0; round < 4; ++round)
      for (const auto& list : lists)
        if (std::ranges::find(list, group.rank()) != list.end())
          gather_and_check(group, list, 100 + 700000 * round, round);
  });
}

TEST_CASE("memory is reused: from the second exchange on the root's pool does not grow, nor does it fault") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {6 << 20}, seed_of(group.rank(), 0));
    std::uint64_t pool = 0;
    for (int round = 0; round < 5; ++round) {
      const GatheredTensors all = get_tensors_parallel(mine, ranks_from(0, 4), group);
      if (group.rank() != 0) continue;
      if (round == 0) pool = pool_of(all);
      RANK_CHECK(pool_of(all) == pool);
      RANK_CHECK(pool == 12 << 20);
      std::uint64_t faults = 0;
      for (const PhaseReport& phase : all.report().phases)
        if (phase.name == "receive") faults = phase.page_faults;
      // Two times 1536 pages were received. MPI itself touches a few.
      if (round >= 2 && faults > 300) throw RankFailure(std::to_string(faults) + " page faults");
    }
    group.barrier();
    const std::uint64_t gone = trim(group);
    if (group.rank() == 0) RANK_CHECK(gone == 12 << 20);
    gather_and_check(group, ranks_from(0, 4), 6 << 20, 1, {.pool_limit = 0});
    const GatheredTensors last = get_tensors_parallel(pattern(DType::u8, {1}, 1), ranks_from(0, 4), group);
    if (group.rank() == 0) RANK_CHECK(pool_of(last) < 1 << 20);
  });
}

TEST_CASE("the root's budget is enforced, an excess is refused on all ranks, and results return their share") {
  run_ranks(4, [](Group& group) {
    const GatherOptions options{.root_tensors = RootTensors::copy, .memory_budget = 5 << 20};
    const Tensor mine = pattern(DType::u8, {1 << 20}, seed_of(group.rank(), 0));
    std::vector<GatheredTensors> kept;
    for (int round = 0; round < 2; ++round)
      kept.push_back(get_tensors_parallel(mine, ranks_from(0, 4), group, options));
    for (int again = 0; again < 2; ++again)
      error_of(ErrorKind::out_of_space, {"rank 0", "memory budget", "2097152"},
               [&] { (void)get_tensors_parallel(mine, ranks_from(0, 4), group, options); });
    for (const GatheredTensors& all : kept)
      for (const auto& [rank, tensor] : all.present())
        RANK_CHECK(is_pattern(tensor, DType::u8, {1 << 20}, seed_of(rank, 0)));
    kept.clear();
    group.barrier();
    gather_and_check(group, ranks_from(0, 4), 1 << 20, 3, options);
    // A merge needs memory for its result and its window.
    error_of(ErrorKind::out_of_space, {"memory budget"}, [&] {
      (void)merge_tensor_parallel(mine, merge::concat(0), ranks_from(0, 4), group, {.memory_budget = 3 << 20});
    });
    (void)trim(group);
    const MergeResult merged =
        merge_tensor_parallel(mine, merge::sum(), ranks_from(0, 4), group, {.memory_budget = 8 << 20});
    RANK_CHECK(merged.tensor().has_value() == (group.rank() == 0));
  });
}

TEST_CASE("a sender without memory to pack in fails one exchange, and the next exchange succeeds") {
  if (under_sanitizer) {
    MESSAGE("skipped: sanitizers need the address space");
    return;
  }
  run_ranks(4, [](Group& group) {
    const Tensor whole = Tensor::allocate(DType::f32, {2048, 4096});
    const TensorView columns = whole.view().slice(1, 0, 2048);
    const auto expect_refusal = [&](const auto& call) {
      rlimit before{};
      RANK_CHECK(::getrlimit(RLIMIT_AS, &before) == 0);
      if (group.rank() == 3) {
        const rlimit small{address_space() + (3 << 20), before.rlim_max};
        RANK_CHECK(::setrlimit(RLIMIT_AS, &small) == 0);
      }
      const Error refusal = error_of(call);
      RANK_CHECK(::setrlimit(RLIMIT_AS, &before) == 0);
      RANK_CHECK(refusal.kind() == ErrorKind::out_of_space && refusal.rank() == 3);
    };
    expect_refusal([&] { (void)get_tensors_parallel(columns, ranks_from(0, 4), group); });
    gather_and_check(group, ranks_from(0, 4), 1 << 20, 1);
    expect_refusal([&] { (void)merge_tensor_parallel(columns, merge::concat(0), ranks_from(0, 4), group); });
    gather_and_check(group, ranks_from(0, 4), 1 << 20, 2);
    const MergeResult merged = merge_tensor_parallel(columns, merge::concat(0), ranks_from(0, 4), group);
    RANK_CHECK(merged.tensor().has_value() == (group.rank() == 0));
  });
}

TEST_CASE("a merge needs no file descriptor") {
  run_ranks(4, [](Group& group) {
    gather_and_check(group, ranks_from(0, 4), 1000, 2);  // except those of MPI
    rlimit before{};
    RANK_CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    const int next = ::dup(0);
    ::close(next);
    const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
    RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    merge_and_check(group, ranks_from(0, 4), merge::concat(0), patterns(DType::u8, {1 << 20}, 0));
    RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  });
}

TEST_CASE("a root that cannot make windows fails one merge at once, and the next merge succeeds") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {1 << 20}, seed_of(group.rank(), 0));
    const auto merge = [&] { (void)merge_tensor_parallel(mine, merge::concat(0), ranks_from(0, 4), group); };
    // A window reserves its memory when it is made.
    if (group.rank() == 0)
      os::set_fault_hook([](std::string_view call, std::string_view) { return call == "fallocate" ? ENOSPC : 0; });
    const auto begin = Clock::now();
    const Error refusal = error_of(merge);
    os::set_fault_hook(nullptr);
    RANK_CHECK(refusal.rank() == 0 && refusal.kind() == ErrorKind::out_of_space);
    RANK_CHECK(Clock::now() - begin < 2s);
    merge();
  });
}

TEST_CASE("rings of merges count against the budget of later calls") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::u8, {1 << 20}, seed_of(group.rank(), 0));
    const GatherOptions ample{.memory_budget = 64 << 20};
    for (int round = 0; round < 2; ++round)
      (void)merge_tensor_parallel(mine, merge::sum(), ranks_from(0, 4), group, ample);
    group.barrier();
    // The two rings for rank 1 have 1 MiB each. Buffers in the pool that the merges no longer use are reused.
    error_of(ErrorKind::out_of_space, {"rank 0", "memory budget"}, [&] {
      (void)get_tensors_parallel(pattern(DType::u8, {12 << 20}, 1), ranks_from(0, 4), group,
                                 {.memory_budget = 25 << 20});
    });
    (void)trim(group);
    group.barrier();
    (void)get_tensors_parallel(pattern(DType::u8, {12 << 20}, 1), ranks_from(0, 4), group, {.memory_budget = 25 << 20});
  });
}

TEST_CASE(
    "more memory than the host has is refused on all ranks before a byte is moved, and the group remains usable") {
  run_ranks(4, [](Group& group) {
    const std::byte byte{7};
    const TensorView huge(DType::u8, {std::int64_t{1} << 44}, &byte, {0});
    for (const int first : {0, 2}) {
      error_of(ErrorKind::out_of_space, {"needed", "available"},
               [&] { (void)get_tensors_parallel(huge, ranks_from(first, 4), group); });
      error_of(ErrorKind::out_of_space, {"needed", "available"},
               [&] { (void)merge_tensor_parallel(huge, merge::sum(), ranks_from(first, 4), group); });
      gather_and_check(group, ranks_from(first, 4), 100000, first);
    }
  });
}

TEST_CASE("strided, packed, tiny and arena tensors in one config, in many pieces") {
  run_ranks(4, [](Group& group) {
    SharedArena arena(8 << 20);
    const auto config_of = [&](int rank, bool from_arena) {
      Config config = Config::object();
      const Tensor whole = pattern(DType::f32, {1500, 1201}, seed_of(rank, 1));
      config["strided"] = Tensor(whole.view().slice(1, 3, 1200).transposed(), whole.owner());
      config["packed"] = pattern(DType::f4_e2m1, {333, 6}, seed_of(rank, 2));
      config["nothing"] = pattern(DType::i8, {0, 3}, 1);
      for (int i = 0; i < 3000; ++i)
        config["tiny" + std::to_string(i)] = pattern(DType::u8, {i % 300}, seed_of(rank, i));
      Tensor leased =
          from_arena ? arena.allocate(DType::bf16, {1000, 1000}) : Tensor::allocate(DType::bf16, {1000, 1000});
      fill(leased.mutable_data(), leased.nbytes(), seed_of(rank, 3));
      config["arena"] = leased;
      return config;
    };
    for (const int first : {1, 3}) {
      const Config mine = config_of(group.rank(), true);
      const GatheredConfigs all = get_configs_parallel(&mine, ranks_from(first, 4), group);
      for (const auto& [rank, config] : all.present()) RANK_CHECK(config == config_of(rank, false));
    }
  });
}

TEST_CASE("sums have the same bits as over shared memory") {
  run_ranks(4, [](Group& group) {
    for (const DType dtype : {DType::bf16, DType::f32, DType::f8_e4m3fn})
      for (const std::vector<int>& ranks : {std::vector<int>{2, 0, 3, 1}, std::vector<int>{0, 1, 2, 3}}) {
        const ExchangeReport report = merge_and_check(group, ranks, merge::sum(), patterns(dtype, {1001, 777}, 1));
        RANK_CHECK(report.route == Route::mpi);
      }
  });
}

TEST_CASE("a merge takes memory for its result and a window, not for the senders' tensors") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = pattern(DType::f32, {4096, 1024}, seed_of(group.rank(), 0));  // 16 MiB
    for (const Merge& merge : {merge::sum(), merge::concat(0), merge::concat(1)}) {
      (void)trim(group);
      const std::uint64_t result = std::holds_alternative<merge::Sum>(merge) ? 16 << 20 : 64 << 20;
      const MergeResult merged = merge_tensor_parallel(mine, merge, ranks_from(0, 4), group);
      // Contiguous bytes are received directly into the result, except those from the root's own host.
      const bool is_straight = std::holds_alternative<merge::Concat>(merge) && std::get<merge::Concat>(merge).dim == 0;
      const std::uint64_t window = is_straight ? 8 << 20 : 24 << 20;
      if (group.rank() == 0) RANK_CHECK(pool_of(merged) <= result + window);
    }
  });
}

// kill_test covers a killed sender, and the root.
TEST_CASE("a sender that is stopped while its pieces are in flight") {
  constexpr int victim = 3;
  const GroupOf group(4);
  Ranks ranks(4, [&](int rank) {
    auto mine = group.join(rank);
    mine->set_timeout(1s);
    const Tensor early = pattern(DType::u8, {100000}, seed_of(rank, 1));
    const GatheredTensors delivered =
        get_tensors_parallel(early, ranks_from(0, 4), *mine, {.root_tensors = RootTensors::copy});
    const Tensor tensor = Tensor::allocate(DType::u8, {96 << 20});
    std::memset(tensor.mutable_data(), rank, tensor.nbytes());
    mine->barrier();
    const Clock::time_point begin = Clock::now();
    if (rank == victim) kill_self_after(15ms, SIGSTOP);
    const Error error = error_of([&] {
      for (;;) {
        (void)get_tensors_parallel(tensor, ranks_from(0, 4), *mine);
        (void)merge_tensor_parallel(tensor, merge::max(), ranks_from(0, 4), *mine);
      }
    });
    // A rank that waits for the root may time out before the root does.
    if (!says(error, "rank 3") && !says(error, "rank 0")) throw RankFailure(error.what());
    RANK_CHECK(error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::peer_lost);
    RANK_CHECK(Clock::now() - begin < 4s);
    for (const auto& [sender, received] : delivered.present())
      RANK_CHECK(is_pattern(received, DType::u8, {100000}, seed_of(sender, 1)));
  });
  check_ended(ranks.wait_and_kill(victim, 5s), {victim});
}

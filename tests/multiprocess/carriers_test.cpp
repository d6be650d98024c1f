// SPDX-License-Identifier: Apache-2.0
// Gathers from many ranks of several hosts, in which one rank of each host sends the small parts of its host
// (src/multihost/carriers.hpp). 48 ranks on six hosts: five carriers and 35 riders.

#include <signal.h>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/open_sockets.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int ranks_of_six_hosts = 48;
constexpr int ranks_of_a_host = 8;

/// The ranks from `first` on in a circle, without those for which `is_left_out` is true.
std::vector<int> list_from(int first, const std::function<bool(int)>& is_left_out = {}) {
  std::vector<int> list;
  for (int i = 0; i < ranks_of_six_hosts; ++i)
    if (const int rank = (first + i) % ranks_of_six_hosts; !is_left_out || !is_left_out(rank)) list.push_back(rank);
  return list;
}

}  // namespace

TEST_CASE("gathers from 48 ranks of six hosts: every byte of parts of any size") {
  run_ranks(ranks_of_six_hosts, [](Group& group) {
    // Parts with the header message, with grants, at the limit of a carrier, and above it.
    for (const std::int64_t bytes : {0, 1, 20'000, 100'000, (1 << 20) - 200, 1 << 20, 1'500'000})
      gather_and_check(group, list_from(0), bytes, static_cast<std::uint64_t>(bytes));
    for (const int first : {20, 47, 1}) gather_and_check(group, list_from(first), 70'000, 3);
    // Lists without some carriers, and with one rank on most hosts.
    gather_and_check(group, list_from(3, [](int rank) { return rank % ranks_of_a_host == 0; }), 5'000, 4);
    gather_and_check(group, list_from(0, [](int rank) { return rank >= 8 && rank < 13; }), 5'000, 5);
    gather_and_check(group, list_from(0, [](int rank) { return rank >= 41; }), 40'000, 6);
  });
}

TEST_CASE("configs of different sizes from 48 ranks of six hosts, and ranks without a value") {
  run_ranks(ranks_of_six_hosts, [](Group& group) {
    const std::vector<int> list = list_from(9);
    for (int turn = 0; turn < 6; ++turn) {
      // Carriers, riders and whole hosts have no value in some turns. The largest parts do not fit a carrier.
      const auto has_value = [turn](int rank) { return rank % (turn + 2) != 1 && (turn != 3 || rank / 8 != 4); };
      const auto length = [turn](int rank) { return std::int64_t{1} << ((rank * 7 + turn * 5) % 22); };
      const Config mine = Config::object(
          {{"rank", group.rank()},
           {"weight", pattern(DType::u8, {length(group.rank()), 2}, static_cast<std::uint64_t>(group.rank()))},
           {"bias", pattern(DType::f32, {group.rank(), 3}, static_cast<std::uint64_t>(turn))}});
      const GatheredConfigs all = get_configs_parallel(has_value(group.rank()) ? &mine : nullptr, list, group);
      RANK_CHECK(all.size() == (group.rank() == 9 ? list.size() : 0));
      for (std::size_t i = 0; i < all.size(); ++i) {
        const int rank = list[i];
        RANK_CHECK(all[i].has_value() == has_value(rank));
        if (!all[i]) continue;
        RANK_CHECK(all[i]->at("rank").as_int() == rank);
        RANK_CHECK(is_pattern(all[i]->at("weight").as_tensor(), DType::u8, {length(rank), 2},
                              static_cast<std::uint64_t>(rank)));
        RANK_CHECK(is_pattern(all[i]->at("bias").as_tensor(), DType::f32, {rank, 3}, static_cast<std::uint64_t>(turn)));
      }
    }
  });
}

TEST_CASE("the root of a gather from many ranks has one socket per carrier") {
  if (std::string_view(std::getenv("MUSTER_TEST_GROUP")) != "tcp-6") return;
  run_ranks(ranks_of_six_hosts, [](Group& group) {
    group.barrier();
    const std::size_t before = open_sockets();
    for (int turn = 0; turn < 3; ++turn) gather_and_check(group, list_from(0), 100'000, 7);
    if (group.rank() == 0) RANK_CHECK(open_sockets() <= before + 5);
    group.barrier();
  });
}

TEST_CASE("a malformed part of a rider is reported with its rank, and the group remains usable") {
  run_ranks(ranks_of_six_hosts, [](Group& group) {
    const std::vector<int> list = list_from(0);
    for (const std::int64_t bytes : {10, 50'000}) {
      const Tensor mine = pattern(DType::u8, {bytes}, static_cast<std::uint64_t>(group.rank()));
      std::optional<DamagedDescriptor> damage;
      if (group.rank() == 29) damage.emplace(0, 3);
      fails_alike(group, ErrorKind::corrupt, {"rank 29"}, [&] { (void)get_tensors_parallel(mine, list, group); });
    }
  });
}

TEST_CASE("a rider or a carrier that dies during gathers is named by all other ranks") {
  for (const int victim : {13, 16}) {
    CAPTURE(victim);
    const auto ended = try_ranks(
        ranks_of_six_hosts,
        [&](Group& group) {
          const std::vector<int> list = list_from(0);
          const Tensor mine = pattern(DType::u8, {30'000}, static_cast<std::uint64_t>(group.rank()));
          const Error error = error_of([&] {
            for (int turn = 0;; ++turn) {
              if (group.rank() == victim && turn == 5) ::raise(SIGKILL);
              (void)get_tensors_parallel(mine, list, group);
            }
          });
          if (error.rank() != victim) throw RankFailure("another rank is blamed: " + std::string(error.what()));
        },
        60s);
    check_ended(ended, {victim});
  }
}

TEST_CASE("a stopped rider is named at the deadline, not its carrier") {
  const int victim = 13;
  const GroupOf job(ranks_of_six_hosts);
  Ranks processes(ranks_of_six_hosts, [&](int rank) {
    const auto group = job.join(rank);
    group->barrier();
    group->set_timeout(2s);
    const std::vector<int> list = list_from(0);
    const Tensor mine = pattern(DType::u8, {30'000}, static_cast<std::uint64_t>(rank));
    (void)get_tensors_parallel(mine, list, *group);
    if (rank == victim) kill_self_after(100ms, SIGSTOP);
    const Error error = error_of([&] {
      for (;;) (void)get_tensors_parallel(mine, list, *group);
    });
    if (error.rank() != victim) throw RankFailure("another rank is blamed: " + std::string(error.what()));
  });
  check_ended(processes.wait_and_kill(victim, 20s), {victim});
}

// SPDX-License-Identifier: Apache-2.0
// If ranks make different collective calls, all of them throw, and the group remains usable.

#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "muster/gather.hpp"
#include "muster/merge_gather.hpp"
#include "muster/process_group.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

struct CollectiveCall {
  std::string name;
  std::function<void(Group& group)> run;
};

std::vector<CollectiveCall> collective_calls() {
  const auto tensor = [](const Group& group, std::int64_t bytes) {
    return pattern(DType::u8, {bytes}, seed_of(group.rank(), 1));
  };
  return {
      {"a small gather", [=](Group& group) { (void)get_tensors_parallel(tensor(group, 50), all_ranks, group); }},
      {"a large gather", [=](Group& group) { (void)get_tensors_parallel(tensor(group, 2 << 20), all_ranks, group); }},
      {"a gather of configs",
       [](Group& group) {
         const Config config(group.rank());
         (void)get_configs_parallel(&config, all_ranks, group);
       }},
      {"a merge",
       [=](Group& group) { (void)merge_tensor_parallel(tensor(group, 900), merge::concat(0), all_ranks, group); }},
      {"a stream",
       [=](Group& group) {
         int given = 0;
         const auto source = [&]() -> std::optional<Config> {
           if (given++ == 3) return std::nullopt;
           return Config(tensor(group, 70'000));
         };
         (void)gather_each(source, all_ranks, group, [](LayerPart&) {});
       }},
      {"a barrier", [](Group& group) { group.barrier(); }},
      {"a duplicate", [](Group& group) { (void)group.duplicate(); }},
      {"a split", [](Group& group) { (void)group.split(all_ranks); }},
      {"a process group", [](Group& group) { ProcessGroup(group).barrier(); }},
  };
}

void check_pairs(int size) {
  run_ranks(size, [&](Group& group) {
    const std::vector<CollectiveCall> calls = collective_calls();
    const auto is_gather = [](std::size_t call) { return call < 2; };
    const auto makes_a_part = [](std::size_t call) { return call == 6 || call == 8; };
    for (std::size_t a = 0; a < calls.size(); ++a)
      for (std::size_t b = 0; b < calls.size(); ++b) {
        // These pairs are the same call, or gathers, whose sizes may differ.
        if (a == b || (is_gather(a) && is_gather(b)) || (makes_a_part(a) && makes_a_part(b))) continue;
        const CollectiveCall& mine = calls[group.rank() == 0 ? a : b];
        const std::string pair = calls[a].name + " and " + calls[b].name + ": ";
        try {
          mine.run(group);
          throw RankFailure(pair + "nothing was thrown");
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::rank_mismatch) throw RankFailure(pair + error.what());
        }
        if (group.error()) throw RankFailure(pair + "the group has failed: " + group.error()->what());
        gather_and_check(group, ranks_from(0, size), 300, a);
        gather_and_check(group, ranks_from(0, size), 3 << 20, b);
      }
    for (const CollectiveCall& call : calls) call.run(group);
  });
}

}  // namespace

TEST_CASE("two ranks that make different calls throw, and their group remains usable") {
  check_pairs(2);
}

TEST_CASE("three ranks that make different calls throw, and their group remains usable") {
  check_pairs(3);
}

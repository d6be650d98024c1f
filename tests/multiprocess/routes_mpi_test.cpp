// SPDX-License-Identifier: Apache-2.0
// Routes between ranks on two hosts. Shared memory cannot be forced there, and the possible routes of a list depend on
// the hosts of its ranks.

#include <cstring>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/exchanges.hpp"

using namespace muster;
using namespace muster::test;

namespace {

Tensor tensor_of(int rank) {
  return pattern(DType::u8, {4000}, static_cast<std::uint64_t>(rank));
}

void check(const GatheredTensors& all, Route route, std::string_view reason) {
  RANK_CHECK(all.report().route == route);
  RANK_CHECK(all.report().reason.find(reason) != std::string::npos);
  for (const auto& [rank, tensor] : all.present()) RANK_CHECK(bitwise_equal(tensor, tensor_of(rank)));
}

}  // namespace

TEST_CASE("a local group of a program that could use MPI") {
  const std::string key = unique_key();
  run_processes(2, [&](int rank) {
    const auto group = local_group({.key = key, .rank = rank, .size = 2, .timeout = {}, .global_ranks = {}});
    error_of(ErrorKind::unsupported,
             {"the route \"mpi\" is forced by the caller", "the group is of kind \"local\"",
              "that all of them can use (shm)"},
             [&] { (void)get_tensors_parallel(tensor_of(rank), ranks_from(0, 2), *group, {.route = Route::mpi}); });
    check(get_tensors_parallel(tensor_of(rank), ranks_from(0, 2), *group), Route::shm, "share memory");
  });
}

TEST_CASE("four ranks on two hosts") {
  run_ranks(4, [](Group& group) {
    const Tensor mine = tensor_of(group.rank());
    const auto gathered = [&](const std::vector<int>& list, const GatherOptions& options = {}) {
      return get_tensors_parallel(mine, list, group, options);
    };
    const std::vector<int> all = ranks_from(0, 4);
    const bool on_first = group.rank() < 2;
    // Ranks 0 and 1 share a host, ranks 2 and 3 the other.
    check(gathered(all), Route::mpi, "several hosts");
    check(gathered(on_first ? std::vector{1, 0} : std::vector{2, 3}), Route::shm, "share memory");
    check(gathered({group.rank()}), Route::local, "one rank");
    const std::vector<int> across = group.rank() % 2 == 0 ? std::vector{0, 2} : std::vector{3, 1};
    check(gathered(across), Route::mpi, "several hosts");
    check(gathered(all, {.route = Route::mpi}), Route::mpi, "forced by the caller");
    check(gathered(on_first ? std::vector{0, 1} : std::vector{3, 2}, {.route = Route::mpi}), Route::mpi,
          "forced by the caller");
    // One exchange with a list on one host and two lists of one rank each.
    check(gathered(on_first ? std::vector{0, 1} : std::vector{group.rank()}), on_first ? Route::shm : Route::local, "");

    const auto refused = [&](const std::function<void()>& call) {
      fails_alike(group, ErrorKind::unsupported,
                  {"the route \"shm\" is forced by the caller",
                   "4 of the 4 ranks of the list [0, 1, 2, 3] cannot use it", "rank 0: shares no memory with rank 2",
                   "rank 3: shares no memory with rank 0", "that all of them can use (mpi)"},
                  call);
    };
    refused([&] { (void)gathered(all, {.route = Route::shm}); });
    check(gathered(all), Route::mpi, "several hosts");
    refused([&] { (void)merge_tensor_parallel(mine, merge::concat(0), all, group, {.route = Route::shm}); });
    refused([&] {
      (void)gather_each([] { return std::optional<Config>(); }, all, group, [](LayerPart&) {}, {.route = Route::shm});
    });
    check(gathered(all), Route::mpi, "several hosts");
  });
}

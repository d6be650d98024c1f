// SPDX-License-Identifier: Apache-2.0
// Parts of a group: their members, their isolation from each other and from the whole group, and their failures.

#include <doctest/doctest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "muster/async.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// Every member passes a tensor. Rank 0 of `group` receives those of `members`, which are ranks of the job.
void check_gather(Group& group, const std::vector<int>& members, int me, std::uint64_t seed) {
  const auto all = ranks_from(0, group.size());
  const Tensor mine = pattern(DType::u8, {50000}, seed + static_cast<std::uint64_t>(me));
  const GatheredTensors result = get_tensors_parallel(mine, all, group);
  RANK_CHECK(result.size() == (group.rank() == 0 ? members.size() : 0));
  for (const auto& [rank, tensor] : result.present())
    RANK_CHECK(is_pattern(tensor, DType::u8, {50000},
                          seed + static_cast<std::uint64_t>(members[static_cast<std::size_t>(rank)])));
  const MergeResult merged = merge_tensor_parallel(mine, merge::concat(0), all, group);
  if (group.rank() == 0) RANK_CHECK((merged.tensor()->shape() == Shape{50000 * group.size()}));
  std::uint64_t layers = 0;
  const auto source = [&, next = 0]() mutable -> std::optional<Config> {
    if (next++ == 5) return std::nullopt;
    return Config(mine);
  };
  gather_each(source, all, group, [&](LayerPart& part) {
    RANK_CHECK(part.present().size() == members.size());
    ++layers;
  });
  RANK_CHECK(layers == (group.rank() == 0 ? 5U : 0U));
}

/// Returns the list that contains a rank, or an empty list.
std::vector<int> list_of(int rank, const std::vector<std::vector<int>>& lists) {
  for (const std::vector<int>& list : lists)
    if (std::ranges::find(list, rank) != list.end()) return list;
  return {};
}

}  // namespace

TEST_CASE("parts have the ranks of their lists, in that order, and do not mix with each other or the whole group") {
  const std::vector<std::vector<int>> lists = {{4, 0}, {1, 2, 5}};
  run_ranks(6, [&](Group& group) {
    const int me = group.rank();
    const std::vector<int> list = list_of(me, lists);
    const auto part = group.split(list);
    RANK_CHECK((part == nullptr) == (me == 3));
    if (part) {
      RANK_CHECK(part->size() == static_cast<int>(list.size()));
      RANK_CHECK(list[static_cast<std::size_t>(part->rank())] == me);
      for (int rank = 0; rank < part->size(); ++rank)
        RANK_CHECK(part->info(rank).global_rank == list[static_cast<std::size_t>(rank)]);
      RANK_CHECK(part->nonce() != group.nonce());
      // One part makes more calls than the other.
      for (int turn = 0; turn < (list.size() == 2 ? 5 : 1); ++turn) check_gather(*part, list, me, 100);
      if (part->rank() == 1) {
        const std::uint32_t word = 7;
        part->send(0, std::as_bytes(std::span(&word, 1)));
      }
      if (part->rank() == 0) RANK_CHECK(part->receive(1, 4).front() == std::byte{7});
    }
    check_gather(group, {0, 1, 2, 3, 4, 5}, me, 200);
  });
}

TEST_CASE("parts of parts, duplicates of parts and of the whole group at the same time") {
  run_ranks(4, [](Group& group) {
    const int me = group.rank();
    const std::vector<int> pair = me < 2 ? std::vector{0, 1} : std::vector{3, 2};
    const auto part = group.split(pair);
    std::vector<std::shared_ptr<Group>> copies;
    for (int i = 0; i < 3; ++i) copies.push_back(part->duplicate());
    const auto whole = group.duplicate();
    const auto alone = part->split(std::vector{part->rank()});
    RANK_CHECK(alone->size() == 1);
    RANK_CHECK(alone->info(0).global_rank == me);
    for (const auto& copy : copies) check_gather(*copy, pair, me, 300);
    check_gather(*whole, {0, 1, 2, 3}, me, 400);
    check_gather(*alone, {me}, me, 500);
    // The part can also be split again.
    const auto again = group.split(std::vector{3, 1, 2, 0});
    check_gather(*again, {3, 1, 2, 0}, me, 600);
  });
}

TEST_CASE("parts and their duplicates outlive the duplicate that they were split from") {
  run_ranks(4, [](Group& group) {
    auto whole = group.duplicate();
    const std::vector<int> pair = group.rank() < 2 ? std::vector{1, 0} : std::vector{2, 3};
    auto part = whole->split(pair);
    const auto other = whole->split(std::vector{2, 0, 3, 1});
    whole.reset();
    check_gather(*part, pair, group.rank(), 10);
    const auto copy = part->duplicate();
    part.reset();
    check_gather(*copy, pair, group.rank(), 20);
    check_gather(*other, {2, 0, 3, 1}, group.rank(), 30);
  });
}

TEST_CASE("asynchronous calls on parts") {
  run_ranks(4, [](Group& group) {
    const int me = group.rank();
    const std::vector<int> near = me < 2 ? std::vector{1, 0} : std::vector{2, 3};
    const std::vector<int> far = me % 2 == 0 ? std::vector{2, 0} : std::vector{1, 3};
    const Tensor mine = pattern(DType::u8, {50000}, static_cast<std::uint64_t>(me));
    const auto check = [&](const GatheredTensors& result, const Group& part, const std::vector<int>& members) {
      RANK_CHECK(result.present().size() == (part.rank() == 0 ? members.size() : 0));
      for (const auto& [rank, tensor] : result.present())
        RANK_CHECK(is_pattern(tensor, DType::u8, {50000},
                              static_cast<std::uint64_t>(members[static_cast<std::size_t>(rank)])));
    };
    const auto nearby = group.split(near);
    const auto across = group.split(far);
    for (int turn = 0; turn < 3; ++turn) {
      auto one = get_tensors_async(mine, all_ranks, *nearby);
      auto other = get_tensors_async(mine, all_ranks, *across);
      check(one.get(), *nearby, near);
      check(other.get(), *across, far);
    }
  });
}

TEST_CASE("a part outlives the first group") {
  const GroupOf group_of(4);
  Ranks ranks(4, [&](int rank) {
    auto group = group_of.join(rank, 20s);
    const std::vector<int> pair = rank < 2 ? std::vector{0, 1} : std::vector{2, 3};
    const auto part = group->split(pair);
    group.reset();
    for (int turn = 0; turn < 3; ++turn) check_gather(*part, pair, rank, 10);
  });
  check_ended(ranks.wait());
}

TEST_CASE("invalid lists are refused on all ranks, and the group remains usable") {
  struct Case {
    std::vector<std::vector<int>> lists;  // for each rank
    ErrorKind kind;
    const char* words;
  };
  const std::vector<Case> cases = {
      {{{0, 1}, {0, 1}, {2, 4}, {}}, ErrorKind::invalid_argument, "rank 4 is out of range"},
      {{{0, 0}, {}, {}, {}}, ErrorKind::invalid_argument, "twice"},
      {{{0, 1}, {1, 0}, {}, {}}, ErrorKind::rank_mismatch, "Pass the same list on all its members"},
      {{{0, 1}, {}, {2, 3}, {2, 3}}, ErrorKind::rank_mismatch, "and 1 of them passed the same list"},
  };
  run_ranks(4, [&](Group& group) {
    for (const Case& one : cases) {
      const Error error = error_of([&] { (void)group.split(one.lists[static_cast<std::size_t>(group.rank())]); });
      RANK_CHECK(error.kind() == one.kind);
      RANK_CHECK(says(error, one.words));
    }
    // A rank that is not in its list gets no group.
    RANK_CHECK(group.split(std::vector{(group.rank() + 1) % 4}) == nullptr);
    group.barrier();
  });
}

TEST_CASE("a part that fails does not affect the whole group and the other parts") {
  run_ranks(4, [](Group& group) {
    const int me = group.rank();
    const std::vector<int> pair = me < 2 ? std::vector{0, 1} : std::vector{2, 3};
    const auto part = group.split(pair);
    if (me == 3) part->abort(Error(ErrorKind::io, "the disk of rank 3"));
    if (me >= 2)
      RANK_CHECK(says(error_of([&] { part->barrier(); }), "the disk of rank 3"));
    else
      check_gather(*part, pair, me, 10);
    check_gather(group, {0, 1, 2, 3}, me, 20);
  });
}

TEST_CASE("a killed rank ends its part, named by its number in the job; the other part continues") {
  const GroupOf group_of(4);
  Ranks ranks(4, [&](int rank) {
    const auto group = group_of.join(rank, 20s);
    const std::vector<int> pair = rank % 2 == 0 ? std::vector{0, 2} : std::vector{3, 1};
    const auto part = group->split(pair);
    check_gather(*part, pair, rank, 10);
    if (rank == 3) ::raise(SIGKILL);
    if (rank == 1) {
      const auto begin = std::chrono::steady_clock::now();
      const Error error = error_of([&] { part->barrier(); });
      RANK_CHECK(error.kind() == ErrorKind::peer_lost);
      RANK_CHECK(error.rank() == 3);
      RANK_CHECK(says(error, "rank 3"));
      RANK_CHECK(std::chrono::steady_clock::now() - begin < 5s);
    } else {
      for (int turn = 0; turn < 3; ++turn) check_gather(*part, pair, rank, 20);
    }
    // The destructor of the failed group does not wait for the dead rank.
    group->abort(Error(ErrorKind::cancelled, "enough"));
  });
  check_ended(ranks.wait(), {3});
}

TEST_CASE("a deadline in a part names the missing rank by its number in the job") {
  run_ranks(3, [](Group& group) {
    const auto part = group.split(std::vector{2, 1});
    if (group.rank() == 2) {
      const Error error = error_of([&] { part->barrier({.timeout = 300ms, .stop = {}, .phase = "meeting"}); });
      RANK_CHECK(error.kind() == ErrorKind::timeout);
      RANK_CHECK(says(error, "rank 1"));
    }
    group.barrier();
  });
}

TEST_CASE("thousands of parts one after another take no more memory than one") {
  run_ranks(2, [](Group& group) {
    for (int turn = 0; turn < 1000; ++turn) {
      const auto part = group.split(std::vector{1, 0});
      part->barrier();
    }
  });
}

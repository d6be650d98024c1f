// SPDX-License-Identifier: Apache-2.0
// Tables and sets of ranks agree with a linear search, and duplicates share the tables of their group.

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "muster/error.hpp"
#include "src/group/group.hpp"
#include "src/group/rank_table.hpp"

using namespace muster;
using group::RankSet;
using group::RankTable;

namespace {

std::shared_ptr<const RankTable> table_of(const std::vector<int>& numbers) {
  std::vector<RankInfo> ranks;
  for (const int number : numbers) ranks.push_back({number, "host", 1});
  return RankTable::make(std::move(ranks));
}

/// Rank 0 of a group whose other ranks always pass the record that it passes.
class LoneRank final : public group::BaseGroup {
 public:
  explicit LoneRank(std::shared_ptr<const RankTable> ranks)
      : group::BaseGroup(0, std::move(ranks), {}, std::chrono::seconds(1)) {}
  [[nodiscard]] std::string_view kind() const noexcept override { return "lone"; }
  [[nodiscard]] bool has_failure() const noexcept override { return false; }
  void progress() noexcept override {}
  /// Ranks that pass no list in split(), although the list has them.
  std::vector<int> silent;

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return 0; }
  void do_abort(const Error&) noexcept override {}
  [[nodiscard]] std::optional<Error> do_failure() const override { return std::nullopt; }
  void do_barrier(const WaitOptions&) override {}
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions&) override {
    for (std::size_t rank = 0; rank * mine.size() < all.size(); ++rank) {
      const std::span<std::byte> to = all.subspan(rank * mine.size(), mine.size());
      // A record of more than a status is that of a list.
      if (mine.size() > 4 && std::ranges::find(silent, static_cast<int>(rank)) != silent.end())
        std::ranges::fill(to, std::byte{0});
      else
        std::ranges::copy(mine, to.begin());
    }
  }
  void do_wait_until(const std::function<bool()>&, const std::function<void(std::chrono::nanoseconds)>&,
                     std::span<const int>, const WaitOptions&) override {}
  bool do_try_send(int, const group::PacketHead&, std::span<const std::byte>) override { return false; }
  bool do_try_receive(int, const group::PacketPlace&) override { return false; }
  void do_wait_for_packets(const std::function<bool()>&, std::span<const int>, const WaitOptions&) override {}
  std::shared_ptr<group::BaseGroup> make_part(const SplitPart& part, Tie, const WaitOptions&) override {
    if (part.position < 0) return nullptr;
    return std::make_shared<LoneRank>(RankTable::part(ranks(), part.members));
  }
};

}  // namespace

TEST_CASE("a table finds ranks by their numbers in the job, in any order") {
  for (const std::vector<int>& numbers :
       std::vector<std::vector<int>>{{0}, {0, 1, 2, 3}, {100, 101, 205}, {7, 3, 9, 0}, {4, 4, 2}}) {
    const auto table = table_of(numbers);
    for (int number = -1; number < 210; ++number) {
      const auto found = std::ranges::find(numbers, number);
      CHECK(table->rank_of(number) == (found == numbers.end() ? -1 : static_cast<int>(found - numbers.begin())));
    }
  }
}

TEST_CASE("a part with all ranks in their order shares the table, and any other part has its own") {
  const auto table = table_of({10, 11, 12});
  CHECK(RankTable::part(table, table->all()) == table);
  CHECK(RankTable::part(table, std::vector{0, 1, 2}) == table);
  const auto other = RankTable::part(table, std::vector{2, 0});
  REQUIRE(other->size() == 2);
  CHECK((*other)[0].global_rank == 12);
  CHECK(other->rank_of(10) == 1);
  CHECK(other->rank_of(11) == -1);
  CHECK_FALSE(table->is_all(std::vector{0, 1}));
  CHECK_FALSE(table->is_all(std::vector{0, 2, 1}));
}

TEST_CASE("a set agrees with a linear search, for short and long lists in any order") {
  std::mt19937 random(7);
  for (const int length : {0, 1, 16, 17, 300})
    for (const bool is_shuffled : {false, true}) {
      std::vector<int> list;
      for (int i = 0; i < length; ++i) list.push_back(3 * i + 1);
      if (is_shuffled) std::ranges::shuffle(list, random);
      const RankSet set(list);
      for (int rank = -1; rank < 3 * length + 3; ++rank)
        CHECK(set.contains(rank) == (std::ranges::find(list, rank) != list.end()));
    }
}

TEST_CASE("duplicates share the table of their group, and split checks its lists") {
  const auto group = std::make_shared<LoneRank>(table_of({5, 6, 7, 8}));
  const auto copy = group->duplicate();
  CHECK(group::inside(*copy).ranks() == group->ranks());
  CHECK(group::inside(*group->split(all_ranks)).ranks() == group->ranks());
  CHECK_THROWS_WITH_AS(group->split(std::vector{0, 2, 0}), doctest::Contains("rank 0 twice"), Error);
  // All four ranks report this list of two.
  CHECK_THROWS_WITH_AS(group->split(std::vector{0, 2}), doctest::Contains("a list of 2 ranks, and 4 of them"), Error);
  group->silent = {1, 3};
  CHECK(group->split(std::vector{0, 2})->size() == 2);
  group->silent = {1, 2, 3};
  CHECK_THROWS_WITH_AS(group->split(std::vector{0, 2}), doctest::Contains("a list of 2 ranks, and 1 of them"), Error);
}

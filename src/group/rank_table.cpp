// SPDX-License-Identifier: Apache-2.0
#include "src/group/rank_table.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace muster::group {

RankTable::RankTable(std::vector<RankInfo> ranks) : ranks_(std::move(ranks)), all_(ranks_.size()) {
  std::iota(all_.begin(), all_.end(), 0);
  if (std::ranges::is_sorted(ranks_, {}, &RankInfo::global_rank)) return;
  by_number_ = all_;
  std::ranges::stable_sort(by_number_, {}, [&](int rank) { return (*this)[rank].global_rank; });
}

std::shared_ptr<const RankTable> RankTable::part(const std::shared_ptr<const RankTable>& all,
                                                 std::span<const int> members) {
  if (all->is_all(members)) return all;
  std::vector<RankInfo> ranks;
  ranks.reserve(members.size());
  for (const int member : members) ranks.push_back((*all)[member]);
  return make(std::move(ranks));
}

bool RankTable::is_all(std::span<const int> members) const noexcept {
  return members.data() == all_.data() ? members.size() == all_.size() : std::ranges::equal(members, all_);
}

int RankTable::rank_of(int number) const noexcept {
  const std::vector<int>& order = by_number_.empty() ? all_ : by_number_;
  const auto number_of = [&](int rank) { return (*this)[rank].global_rank; };
  const auto found = std::ranges::lower_bound(order, number, {}, number_of);
  return found == order.end() || number_of(*found) != number ? -1 : *found;
}

bool RankSet::contains(int rank) const {
  constexpr std::size_t few = 16;
  if (ranks_.size() <= few) return std::ranges::find(ranks_, rank) != ranks_.end();
  if (ordered_.empty()) {
    if (!std::ranges::is_sorted(ranks_)) {
      copy_.assign(ranks_.begin(), ranks_.end());
      std::ranges::sort(copy_);
    }
    ordered_ = copy_.empty() ? ranks_ : std::span<const int>(copy_);
  }
  return std::ranges::binary_search(ordered_, rank);
}

}  // namespace muster::group

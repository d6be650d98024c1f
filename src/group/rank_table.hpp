// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tables and sets of ranks. A table never changes, so a group, its duplicates and their Peers share one.

#include <memory>
#include <span>
#include <vector>

#include "muster/group.hpp"

namespace muster::group {

/// The ranks of a group.
class RankTable {
 public:
  explicit RankTable(std::vector<RankInfo> ranks);
  static std::shared_ptr<const RankTable> make(std::vector<RankInfo> ranks) {
    return std::make_shared<const RankTable>(std::move(ranks));
  }
  /// Returns the table of some ranks of `all`, in the order of `members`. Returns `all` if these are all of its ranks.
  static std::shared_ptr<const RankTable> part(const std::shared_ptr<const RankTable>& all,
                                               std::span<const int> members);

  [[nodiscard]] std::size_t size() const noexcept { return ranks_.size(); }
  [[nodiscard]] const RankInfo& operator[](int rank) const noexcept { return ranks_[static_cast<std::size_t>(rank)]; }
  /// Returns all ranks: 0, 1, ...
  [[nodiscard]] std::span<const int> all() const noexcept { return all_; }
  /// Returns whether these are all ranks of the table, in its order.
  [[nodiscard]] bool is_all(std::span<const int> members) const noexcept;
  /// Returns the rank with that number in the job, or -1 if the table has none.
  [[nodiscard]] int rank_of(int number) const noexcept;

 private:
  std::vector<RankInfo> ranks_;
  std::vector<int> all_;
  std::vector<int> by_number_;  // the ranks in the order of their numbers; empty if ranks_ has this order
};

/// Whether a rank is in a list, for loops over all ranks. The list must outlive the set. Not thread-safe: the first
/// query about a long list may sort a copy of it.
class RankSet {
 public:
  explicit RankSet(std::span<const int> ranks) noexcept : ranks_(ranks) {}
  /// Throws std::bad_alloc.
  [[nodiscard]] bool contains(int rank) const;

 private:
  std::span<const int> ranks_;
  mutable std::span<const int> ordered_;  // empty before the first query about a long list
  mutable std::vector<int> copy_;         // used if the list is not in order
};

}  // namespace muster::group

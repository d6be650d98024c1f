// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers and merges of which every byte is looked at.

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "muster/gather.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/merge_model.hpp"
#include "tests/support/patterns.hpp"

namespace muster::test {

/// Gathers a tensor of each rank, another one in each round.
inline void gather_and_check(SyncGroup& group, const std::vector<int>& ranks, DType dtype, const Shape& shape,
                             std::uint64_t round, const GatherOptions& options = {}) {
  const Tensor mine = pattern(dtype, shape, seed_of(group.rank(), round));
  const GatheredTensors all = get_tensors_parallel(mine, ranks, group, options);
  RANK_CHECK(all.size() == (group.rank() == ranks.front() ? ranks.size() : 0));
  RANK_CHECK(all.present().size() == all.size());
  if (!all.empty()) RANK_CHECK(all.ranks() == ranks);
  for (const auto& [rank, tensor] : all.present()) RANK_CHECK(is_pattern(tensor, dtype, shape, seed_of(rank, round)));
}
inline void gather_and_check(SyncGroup& group, const std::vector<int>& ranks, std::int64_t bytes, std::uint64_t round,
                             const GatherOptions& options = {}) {
  gather_and_check(group, ranks, DType::u8, {bytes}, round, options);
}

/// The call fails on every rank of the group with the same words, all of `parts` among them, and the group goes on.
inline void fails_alike(SyncGroup& group, ErrorKind kind, const std::vector<std::string>& parts,
                        const std::function<void()>& call) {
  const std::string words = error_of(kind, parts, call).what();
  std::array<char, SyncGroup::max_record> mine{};
  std::ranges::copy_n(words.begin(), static_cast<std::ptrdiff_t>(std::min(words.size(), mine.size())), mine.begin());
  std::vector<std::array<char, SyncGroup::max_record>> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (const auto& other : all)
    if (other != mine) throw RankFailure("other words on another rank: " + std::string(other.data()));
  gather_and_check(group, ranks_from(0, group.size()), 999, 0);
}

using Make = std::function<Tensor(int rank)>;

inline Make patterns(DType dtype, const Shape& shape, std::uint64_t round) {
  return [=](int rank) { return pattern(dtype, shape, seed_of(rank, round)); };
}

/// Merges and compares on the first rank of the list; `make` gives any rank's tensor.
inline ExchangeReport merge_and_check(SyncGroup& group, const std::vector<int>& ranks, const Merge& merge,
                                      const Make& make, const GatherOptions& options = {}) {
  const Tensor mine = make(group.rank());
  const Merged merged = merge_tensor_parallel(mine, merge, ranks, group, options);
  RANK_CHECK(merged.ranks() == ranks);
  RANK_CHECK(merged.wait_released(std::chrono::milliseconds(0)));
  RANK_CHECK(merged.tensor().has_value() == (group.rank() == ranks.front()));
  if (!merged.tensor()) return merged.report();
  std::vector<Tensor> sources;
  for (const int rank : ranks) sources.push_back(make(rank));
  const Tensor expected = merge_model(merge, sources);
  RANK_CHECK(merged.tensor()->dtype() == expected.dtype());
  RANK_CHECK(merged.tensor()->shape() == expected.shape());
  RANK_CHECK(bitwise_equal(*merged.tensor(), expected));
  return merged.report();
}

}  // namespace muster::test

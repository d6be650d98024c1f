// SPDX-License-Identifier: Apache-2.0
#pragma once
// The fields that merging ranks add to their records in round 1, and the conclusions from them. The functions are pure
// and give the same result on all ranks that have the records of the list.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/merge.hpp"
#include "src/gather/record.hpp"
#include "src/merge/layout.hpp"

namespace muster::gather {

/// Returns a text such as "concat(0) BF16 [4, 8]" for messages.
std::string merge_text(const Merge& merge, const TensorSpec& spec);
/// Returns a text of everything that must be equal on all ranks of a list. Throws as merge::join if the merge cannot be
/// applied to such a tensor at all.
std::string merge_kind(const Merge& merge, const TensorSpec& spec);
/// Returns ExchangeRecord::merge for this kind of merge.
inline std::uint8_t merge_number(const Merge& merge) noexcept {
  return static_cast<std::uint8_t>(merge.index() + 1);
}
/// Returns whether this kind of merge moves tensors (Same and First never do).
bool merge_moves(std::uint8_t number) noexcept;
bool merge_reduces(std::uint8_t number) noexcept;
/// Writes into this rank's record the fields that are common to all routes. The route itself sets the bytes that move.
void offer_merge(const Merge& merge, const TensorView& own, ExchangeRecord& record);

/// Returns how the tensors of `list` are joined, computed from the records and one of the tensors. Throws as
/// merge::join.
merge::Layout merge_layout(const Merge& merge, const TensorSpec& own, std::span<const int> list,
                           const Records& records);

/// The layout of the data in a merge's segment: synchronization words, the merged tensor, and scratch memory for
/// reductions.
struct MergeArea {
  std::uint64_t target_at = 0;
  std::uint64_t target_bytes = 0;
  std::uint64_t scratch_at = 0;
  std::uint64_t chunk = 0;  ///< bytes of each rank's tensor that are reduced at a time; 0: no reduction
  std::uint64_t total = 0;
};
MergeArea merge_area(bool reduces, std::uint64_t target_bytes, std::size_t ranks) noexcept;

/// Returns whether the slot that the root has offered can be used without a further message.
bool is_warm(const ExchangeRecord& first, const MergeArea& area) noexcept;

/// Returns the shared memory that a rank of the list `members` will take. For the root of a list that merges, it
/// follows from the records of all members. For other ranks it follows from their own record. Returns 0 if it is not
/// known in advance. In that case the rank itself checks before it takes memory.
std::uint64_t merge_fresh_bytes(int rank, const std::vector<int>& members, const Records& records);

/// Returns the members whose tensor differs from the root's, for merges that require equal tensors.
std::vector<int> differing_contents(const std::vector<int>& members, const Records& records);
/// Returns a text such as "has XXH3 0123...".
std::string content_text(const ExchangeRecord& record);

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks that merge tell each other in round 1 beside what every gather does, and what follows from it: pure
// functions, the same on all ranks, those of other lists included.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/merge.hpp"
#include "src/gather/record.hpp"
#include "src/merge/layout.hpp"

namespace muster::gather {

/// "concat(0) BF16 [4, 8]": for messages.
std::string merge_text(const Merge& merge, const TensorSpec& spec);
/// What has to be the same on all ranks of a list, in words. Throws as merge::join where the merge cannot be applied to
/// such a tensor at all.
std::string merge_kind(const Merge& merge, const TensorSpec& spec);
/// Record::merge of a kind.
inline std::uint8_t merge_number(const Merge& merge) noexcept {
  return static_cast<std::uint8_t>(merge.index() + 1);
}
/// Whether tensors of this kind travel (Same and First never do).
bool merge_moves(std::uint8_t number) noexcept;
bool merge_reduces(std::uint8_t number) noexcept;
/// Writes into this rank's record what all routes say of a merge. Bytes that move are the route's to tell.
void offer_merge(const Merge& merge, const TensorView& own, Record& record);

/// How the tensors of `list` make one: from the records, and one of the tensors. Throws as merge::join.
merge::Layout merge_layout(const Merge& merge, const TensorSpec& own, std::span<const int> list,
                           std::span<const Record> records);

/// Where things are in the data of a merge's segment: words, the merged tensor, and room to reduce in.
struct MergeArea {
  std::uint64_t target_at = 0;
  std::uint64_t target_bytes = 0;
  std::uint64_t scratch_at = 0;
  std::uint64_t chunk = 0;  ///< bytes of each rank's tensor that are reduced at a time; 0 if nothing is
  std::uint64_t total = 0;
};
MergeArea merge_area(bool reduces, std::uint64_t target_bytes, std::size_t ranks) noexcept;

/// Whether the slot that the first rank has offered can be used without another word.
bool is_warm(const Record& first, const MergeArea& area) noexcept;

/// Shared memory that a rank of the list `members` will take: its own word, or for the first rank of a list that merges
/// what all its members' records say. 0 if it is not known before (then the rank itself looks before it takes any).
std::uint64_t merge_fresh_bytes(int rank, const std::vector<int>& members, std::span<const Record> records);

/// Members whose tensor is not the first rank's, where that matters.
std::vector<int> differing_contents(const std::vector<int>& members, std::span<const Record> records);
/// "has XXH3 0123...".
std::string content_text(const Record& record);

}  // namespace muster::gather

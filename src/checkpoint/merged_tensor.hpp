// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tensor that is put together from others when a part of it is wanted: what a merge gives, without the whole ever
// being in memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/checkpoint/assembly.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/rows.hpp"

namespace muster {

/// A tensor and where its parts are.
struct MergedTensor {
  std::string name;
  merge::Layout layout;
  std::vector<AssemblySource> sources;                          ///< those that the layout speaks of
  std::vector<int> ranks;                                       ///< whose each of them is, for messages
  std::vector<std::pair<std::size_t, std::size_t>> equal = {};  ///< pairs of sources that must be bit for bit equal
};

/// Fills `target` with the merged tensor's bytes from `offset` on, which begin and end with elements; bytes that no
/// source has are zero. `rows` are merge::rows_of(tensor.layout). Memory is that of the parts. Any thread. Throws
/// Error(io) where a file has become shorter, Error(rank_mismatch) where ranks that must have the same values do not,
/// and what a source's `read` throws.
void read_merged(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset,
                 std::span<std::byte> target);

}  // namespace muster

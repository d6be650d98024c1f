// SPDX-License-Identifier: Apache-2.0
#pragma once
// How bytes are shared out among ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::collectives {

/// Where slice `at` of `count` begins, of bytes that are cut into slices of whole cache lines, as even as that allows.
inline std::uint64_t slice_begin(std::uint64_t bytes, std::size_t count, std::size_t at) noexcept {
  constexpr std::uint64_t cache_line = 64;
  const std::uint64_t lines = (bytes + count * cache_line - 1) / (count * cache_line);
  return std::min(bytes, at * lines * cache_line);
}

/// The begins of all slices, and the end.
inline std::vector<std::uint64_t> even_slices(std::uint64_t bytes, std::size_t count) {
  std::vector<std::uint64_t> bounds(count + 1);
  for (std::size_t at = 0; at <= count; ++at) bounds[at] = slice_begin(bytes, count, at);
  return bounds;
}

}  // namespace muster::collectives

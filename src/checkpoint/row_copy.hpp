// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tensor put together from slices of others: rows of bytes, each made of parts that lie elsewhere with another
// distance from row to row. Concatenating and cutting along any dimension are this one operation.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/checkpoint/merge_layout.hpp"

namespace muster {

/// In each row `bytes` from source + row * stride go to offset `at`.
struct RowPart {
  const std::byte* source = nullptr;
  std::uint64_t stride = 0;
  std::uint64_t bytes = 0;
  std::uint64_t at = 0;
};

/// Parts in ascending order of `at`, without overlap; what none covers is zero.
struct RowCopy {
  std::uint64_t rows = 0;
  std::uint64_t row_bytes = 0;
  std::vector<RowPart> parts;
};

/// Takes bytes of the result, in ascending order of offset.
using ByteSink = std::function<void(std::uint64_t offset, std::span<const std::byte>)>;

/// The merged tensor from contiguous sources, `sources[rank]` being the first byte of that rank's tensor and `shapes`
/// their shapes.
RowCopy merge_rows(const MergedTensor& merged, std::span<const std::byte* const> sources,
                   std::span<const Shape* const> shapes);

/// One rank's shard of a contiguous whole.
RowCopy split_rows(const SplitTensor& split, const TensorSpec& whole, const std::byte* source, int rank);

/// Bytes of scratch memory that copy_rows needs.
inline constexpr std::size_t row_buffer_bytes = std::size_t{4} << 20;

/// Gives all bytes of the result to `sink`: long runs straight from where they lie, short ones through `buffer`.
void copy_rows(const RowCopy& copy, std::span<std::byte> buffer, const ByteSink& sink);

}  // namespace muster

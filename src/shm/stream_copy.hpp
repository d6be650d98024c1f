// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies into shared memory that another process will read.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::shm {

/// Copies a block. Large blocks use non-temporal stores, which do not read the target's lines first and do not evict
/// the caller's data from the caches. The bytes are visible to other processes after publish_fence(). The blocks must
/// not overlap.
void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;

/// Copies a piece of a larger block with non-temporal stores, whatever the size of the piece.
void stream_piece(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;

/// Copies `rows` rows of `bytes` bytes each; the strides are the distances between rows. Uses non-temporal stores if
/// the total is large and the rows are not short.
void stream_rows(std::byte* target, std::uint64_t target_stride, const std::byte* source, std::uint64_t source_stride,
                 std::uint64_t bytes, std::uint64_t rows) noexcept;

/// Copies `lines` cache lines of 64 bytes to an aligned address.
using StreamLines = void (*)(std::byte* target, const std::byte* source, std::size_t lines);
/// Returns the variants that this processor supports; the first one is used. Empty on processors other than x86-64.
std::vector<StreamLines> stream_variants();

/// Orders every stream_copy and stream_rows of this thread before the stores that follow.
void publish_fence() noexcept;

}  // namespace muster::shm

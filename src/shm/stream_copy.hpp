// SPDX-License-Identifier: Apache-2.0
#pragma once
// The copy into shared memory that another process will read.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::shm {

/// Copies; large blocks by non-temporal stores, which do not read the target's lines first and do not push the caller's
/// data out of the caches. They are visible to other processes after publish_fence(). The blocks must not overlap.
void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;

/// Likewise, however few they are: a piece of something large.
void stream_piece(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;

/// Copies `rows` times `bytes`, the rows that many bytes apart on either side; likewise by non-temporal stores where
/// there is much and the rows are not short.
void stream_rows(std::byte* target, std::uint64_t target_stride, const std::byte* source, std::uint64_t source_stride,
                 std::uint64_t bytes, std::uint64_t rows) noexcept;

/// Copies so many lines of 64 bytes to an aligned place.
using StreamLines = void (*)(std::byte* target, const std::byte* source, std::size_t lines);
/// The variants that this processor can run, the one in use first; none on other processors.
std::vector<StreamLines> stream_variants();

/// Orders every stream_copy and stream_rows of this thread before the stores that follow.
void publish_fence() noexcept;

}  // namespace muster::shm

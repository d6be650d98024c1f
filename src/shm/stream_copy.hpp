// SPDX-License-Identifier: Apache-2.0
#pragma once
// The copy into shared memory that another process will read.

#include <cstddef>

namespace muster::shm {

/// Copies; large blocks by non-temporal stores, which do not read the target's lines first and do not push the caller's
/// data out of the caches. They are visible to other processes after publish_fence(). The blocks must not overlap.
void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) noexcept;

/// Orders every stream_copy of this thread before the stores that follow.
void publish_fence() noexcept;

}  // namespace muster::shm

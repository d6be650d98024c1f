// SPDX-License-Identifier: Apache-2.0
#pragma once
// The copy and read kernels of the floor. They belong to the bench, because the floor must not share code with the
// library.

#include <cstddef>
#include <cstdint>
#include <span>

namespace bench {

/// Copies with non-temporal stores in the widest registers of this machine (at least SSE2; memcpy on other
/// architectures than x86). `target` must be 64-byte aligned. Ends with a fence.
void copy_nontemporal(std::byte* target, const std::byte* source, std::size_t bytes);

/// Returns the sum of all 8-byte words, which makes the root read every byte. A tail of less than 8 bytes is ignored.
std::uint64_t sum_words(std::span<const std::byte> bytes);

/// Adds `step` to one word of every page, and returns the number of words. On some machines idle memory is slow at its
/// next use, which must not affect the figures of the floor or the library.
std::uint64_t touch(std::span<std::byte> bytes, std::uint64_t step);

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The two ways to copy that the floor is made of, written for the bench: the floor must not share the library's code.

#include <cstddef>
#include <cstdint>
#include <span>

namespace bench {

/// Past the caches, in the widest stores this machine has (SSE2 at least; memcpy where it is not x86). `target` must be
/// 64-byte aligned. Fenced at the end.
void copy_nontemporal(std::byte* target, const std::byte* source, std::size_t bytes);

/// Adds up all 8-byte words: how the first rank "has read every byte". A tail of less than 8 bytes is left out.
std::uint64_t sum_words(std::span<const std::byte> bytes);

/// Writes a word into every page, adding `step` to it: memory that lay idle is slow at its next use on some machines,
/// and neither floor nor library is to pay for that. Returns the words written.
std::uint64_t touch(std::span<std::byte> bytes, std::uint64_t step);

}  // namespace bench

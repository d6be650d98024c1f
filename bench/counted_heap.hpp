// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counts the heap of this process: operator new and delete of the whole program, including libraries
// (counted_heap.cpp).

#include <cstdint>

namespace bench {

/// Returns the bytes that are allocated now.
std::uint64_t heap_now();
/// Returns the maximum since the last call.
std::uint64_t heap_peak();

}  // namespace bench

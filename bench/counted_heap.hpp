// SPDX-License-Identifier: Apache-2.0
#pragma once
// The heap of this process, counted: operator new and delete of the whole program, libraries included
// (counted_heap.cpp).

#include <cstdint>

namespace bench {

/// Bytes that are allocated now.
std::uint64_t heap_now();
/// The most since the last call.
std::uint64_t heap_peak();

}  // namespace bench

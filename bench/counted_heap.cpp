// SPDX-License-Identifier: Apache-2.0
#include "bench/counted_heap.hpp"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::uint64_t> now{0};
std::atomic<std::uint64_t> peak{0};

void* count(void* memory) {
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  const std::uint64_t all =
      now.fetch_add(malloc_usable_size(memory), std::memory_order_relaxed) + malloc_usable_size(memory);
  std::uint64_t most = peak.load(std::memory_order_relaxed);
  while (all > most && !peak.compare_exchange_weak(most, all, std::memory_order_relaxed)) {
  }
  return memory;
}

void uncount(void* memory) noexcept {
  if (memory == nullptr) {
    return;
  }
  now.fetch_sub(malloc_usable_size(memory), std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t bytes) {
  return count(std::malloc(bytes == 0 ? 1 : bytes));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return count(std::aligned_alloc(static_cast<std::size_t>(alignment),
                                  (bytes + static_cast<std::size_t>(alignment) - 1) /
                                      static_cast<std::size_t>(alignment) * static_cast<std::size_t>(alignment)));
}
// The nothrow version of a sanitizer would not match the operator delete below.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  return memory == nullptr ? nullptr : count(memory);
}
void operator delete(void* memory) noexcept {
  uncount(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  uncount(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  uncount(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  uncount(memory);
}

namespace bench {

std::uint64_t heap_now() {
  return now.load(std::memory_order_relaxed);
}

std::uint64_t heap_peak() {
  return peak.exchange(now.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that bench/counted_heap does not count: the simulator must not appear in the heap of the simulated ranks.

#include <cstddef>
#include <cstdlib>
#include <new>

namespace muster::test {

template <class Value>
struct Uncounted {
  using value_type = Value;
  Uncounted() = default;
  template <class Other>
  Uncounted(const Uncounted<Other>&) noexcept {}  // NOLINT(google-explicit-constructor): an allocator must convert
  Value* allocate(std::size_t count) {
    void* const memory = std::malloc(count * sizeof(Value));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<Value*>(memory);
  }
  void deallocate(Value* memory, std::size_t) noexcept { std::free(memory); }
  friend bool operator==(const Uncounted&, const Uncounted&) = default;
};

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers at fixed places of a file, little-endian, as elements in memory are.

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>

namespace muster::statefile {

static_assert(std::endian::native == std::endian::little, "tensors are stored as they are in memory: little-endian");

/// The caller has seen to it that `at` and what follows is inside.
template <class Number>
Number load(std::span<const std::byte> bytes, std::size_t at) noexcept {
  Number value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class Number>
void store(std::span<std::byte> bytes, std::size_t at, Number value) noexcept {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

}  // namespace muster::statefile

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors and configs whose values show their origin.

#include <cstdint>
#include <cstring>

#include "muster/config.hpp"
#include "muster/tensor.hpp"

namespace muster::test {

/// Fills memory with bytes that depend on the seed and the position.
inline void fill(std::byte* data, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  std::size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(data + i, &state, 8);
  }
  for (; i < bytes; ++i) data[i] = static_cast<std::byte>(seed + i);
}

/// Returns the seed for the data of a rank in a round or in a layer.
inline std::uint64_t seed_of(int rank, std::uint64_t round) {
  return static_cast<std::uint64_t>(rank) * 1000 + round;
}

inline Tensor pattern(DType dtype, Shape shape, std::uint64_t seed) {
  Tensor tensor = Tensor::allocate(dtype, std::move(shape));
  fill(tensor.mutable_data(), tensor.nbytes(), seed);
  return tensor;
}

inline Tensor small(std::uint64_t seed = 1) {
  return pattern(DType::bf16, {2, 3}, seed);
}

inline bool is_pattern(const TensorView& tensor, DType dtype, const Shape& shape, std::uint64_t seed) {
  return bitwise_equal(tensor, pattern(dtype, shape, seed));
}

}  // namespace muster::test

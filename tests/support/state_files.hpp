// SPDX-License-Identifier: Apache-2.0
#pragma once
// States to be written to files.

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "muster/state_file.hpp"
#include "tests/support/patterns.hpp"

namespace muster::test {

/// Returns values that are distributed like weights: compressible, but not trivially.
inline Tensor normal_weights(Shape shape, unsigned seed) {
  Tensor tensor = Tensor::allocate(DType::f32, std::move(shape));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.02F);
  auto* values = reinterpret_cast<float*>(tensor.mutable_data());
  for (std::int64_t i = 0; i < tensor.view().element_count(); ++i) values[i] = normal(random);
  return tensor;
}

inline Tensor zeros(Shape shape) {
  Tensor tensor = Tensor::allocate(DType::f32, std::move(shape));
  std::fill_n(tensor.mutable_data(), tensor.nbytes(), std::byte{0});
  return tensor;
}

inline std::vector<NamedTensor> one(Shape shape = {100, 100}, std::uint64_t seed = 3) {
  return {{"weight", pattern(DType::f32, std::move(shape), seed)}};
}

inline const Config& some_config() {
  static const Config config = parse_json(R"({"quantizer": {"bits": 8, "name": "Gewicht é"}, "list": [1, 2.5, null]})");
  return config;
}

inline std::vector<StateFileWriter::Entry> entries_of(std::span<const NamedTensor> tensors) {
  std::vector<StateFileWriter::Entry> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.dtype(), tensor.shape()});
  return entries;
}

/// Compares names, order, dtypes, shapes and bits.
inline bool holds(const StateFile& file, std::span<const NamedTensor> expected) {
  if (file.tensors().size() != expected.size()) return false;
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (file.tensors()[i].name != expected[i].first || !bitwise_equal(file.tensor(i), expected[i].second)) return false;
  return true;
}

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#pragma once
// A source of tensors that are in memory.

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "src/checkpoint/model/tensor_source.hpp"

namespace muster::test {

class MemorySource : public TensorSource {
 public:
  void add(const std::string& name, DType dtype, Shape shape, std::vector<std::byte> bytes) {
    entries_.push_back({name, dtype, std::move(shape), 0, bytes.size()});
    bytes_.push_back(std::move(bytes));
  }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override {
    REQUIRE(offset + target.size() <= bytes_[tensor].size());
    std::copy_n(bytes_[tensor].begin() + static_cast<std::ptrdiff_t>(offset), target.size(), target.begin());
  }

 private:
  std::vector<TensorEntry> entries_;
  std::vector<std::vector<std::byte>> bytes_;
};

}  // namespace muster::test

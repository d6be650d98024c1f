// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are made of parts of others: slices, transposes, fused and stacked ones, other formats of numbers. They
// are read like any, and made when they are read.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "muster/tensor.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/merge/view.hpp"

namespace muster {

/// The boxes cover it, each element once; a box's `source` is a place among the source's tensors, all of `stored`.
struct ViewedTensor {
  std::string name;
  TensorSpec spec;
  DType stored = DType::u8;
  bool may_overflow = false;  ///< what is too large for the dtype becomes infinity, and is no error
  std::vector<merge::Box> boxes;
};

/// Memory is that of the pieces that are read, and 1 MiB for what lies apart.
class ViewedTensors : public TensorSource {
 public:
  /// `source` outlives this.
  ViewedTensors(const TensorSource& source, std::vector<ViewedTensor> tensors);
  ViewedTensors(std::shared_ptr<const TensorSource> source, std::vector<ViewedTensor> tensors);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  [[nodiscard]] const std::vector<ViewedTensor>& viewed() const noexcept { return tensors_; }
  /// What is read begins and ends with elements. Throws also Error(corrupt) if a box is not within its tensor, and
  /// Error(argument) if a finite number becomes infinite that may not.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return source_.omissions(); }

 private:
  void copy(const ViewedTensor& tensor, const merge::Box& box, std::int64_t begin, std::span<std::byte> target) const;

  std::shared_ptr<const TensorSource> owner_;  // if it is kept
  const TensorSource& source_;
  std::vector<ViewedTensor> tensors_;
  std::vector<TensorEntry> entries_;
};

}  // namespace muster

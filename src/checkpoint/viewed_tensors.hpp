// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that consist of parts of other tensors: slices, transposes, fused and stacked tensors, and casts to other
// number formats. They are computed when they are read.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "muster/tensor.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/merge/view.hpp"

namespace muster {

/// A tensor that boxes cover, each element once. A box's `source` is an index among the source's tensors, all of
/// `stored`.
struct ViewedTensor {
  std::string name;
  TensorSpec spec;
  DType stored = DType::u8;
  bool may_overflow = false;  ///< values too large for the dtype become infinity instead of an error
  std::vector<merge::Box> boxes;
};

/// Memory is that of the pieces that are read, and 1 MiB for scattered elements.
class ViewedTensors : public TensorSource {
 public:
  /// `source` must outlive this object.
  ViewedTensors(const TensorSource& source, std::vector<ViewedTensor> tensors);
  ViewedTensors(std::shared_ptr<const TensorSource> source, std::vector<ViewedTensor> tensors);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  [[nodiscard]] const std::vector<ViewedTensor>& viewed() const noexcept { return tensors_; }
  /// Reads begin and end at element boundaries. Throws also Error(corrupt) if a box is not within its tensor, and
  /// Error(argument) if a finite number becomes infinite and that is not allowed.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return source_.omissions(); }

 private:
  void copy(const ViewedTensor& tensor, const merge::Box& box, std::int64_t begin, std::span<std::byte> target) const;

  std::shared_ptr<const TensorSource> owner_;  // set if this object owns the source
  const TensorSource& source_;
  std::vector<ViewedTensor> tensors_;
  std::vector<TensorEntry> entries_;
};

}  // namespace muster

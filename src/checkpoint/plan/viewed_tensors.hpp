// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that consist of parts of other tensors: slices, transposes, fused and stacked tensors, and casts to other
// number formats. They are computed when they are read.

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include "muster/tensor.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/merge/view.hpp"

namespace muster {

/// A tensor that boxes cover, each element once. A box's `source` is an index among the source's tensors, all of
/// `stored`.
struct ViewedTensor {
  std::string name;
  TensorSpec spec;
  DType stored = DType::u8;
  bool may_overflow = false;  ///< values too large for the dtype become infinity instead of an error
  std::vector<merge::StridedBox> boxes;
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
  /// Error(invalid_argument) if a finite number becomes infinite and that is not allowed.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return source_.omissions(); }

 private:
  void copy(const ViewedTensor& tensor, const merge::StridedBox& box, std::int64_t begin,
            std::span<std::byte> target) const;

  std::shared_ptr<const TensorSource> owner_;  // set if this object owns the source
  const TensorSource& source_;
  std::vector<ViewedTensor> tensors_;
  std::vector<TensorEntry> entries_;
};

// Finds quantised weights among the tensors of a model: packed elements, and their scales, zero points and tables.

/// Decides by the names, the dtypes and the other tensors of a module. A name such as "logit_scale" alone is not
/// enough.
class PackedParts {
 public:
  explicit PackedParts(std::span<const NamedSpec> model);
  /// Returns whether any weight is quantised.
  [[nodiscard]] bool any() const noexcept { return !modules_.empty(); }
  /// Returns whether the tensor is packed, or belongs to a packed weight (a scale, a zero point or a table).
  [[nodiscard]] bool has(const NamedSpec& tensor) const;
  /// Returns whether the module of the tensor, or its parent module, has a quantised weight.
  [[nodiscard]] bool is_in_packed_module(std::string_view name) const;

 private:
  std::set<std::string, std::less<>> modules_;
};

/// Returns true for floating point numbers of 8, 6 or 4 bits, and for packed dtypes. A tensor of such a dtype is always
/// quantised.
bool is_quantised_dtype(DType dtype);

/// Returns the part of a name before its last dot; empty if the name has no dot.
std::string_view module_of(std::string_view name);

}  // namespace muster

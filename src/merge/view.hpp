// SPDX-License-Identifier: Apache-2.0
#pragma once
// Other shapes of one tensor's elements: slices, transposes, interleaved halves. A view gives the position of each of
// its elements. As a box it describes an invertible copy. These functions do not access elements.

#include <cstdint>
#include <span>
#include <vector>

#include "muster/tensor.hpp"

namespace muster::merge {

/// `count` elements or groups of elements, with their distances in the source and in the target.
struct BoxAxis {
  std::int64_t count = 1;
  std::int64_t from = 0;
  std::int64_t to = 0;
  friend bool operator==(const BoxAxis&, const BoxAxis&) = default;
};

/// Element from + sum(i * axis.from) of the source is element to + sum(i * axis.to) of the target. Each element of the
/// target occurs once.
struct StridedBox {
  int source = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::vector<BoxAxis> axes;  ///< in descending order of `to`, each larger than the span of the later axes
  friend bool operator==(const StridedBox&, const StridedBox&) = default;
};

/// Returns the box with source and target exchanged.
StridedBox reversed(StridedBox box);

/// Returns the part of a box in the elements [begin, end) of the target: at most two boxes for each axis.
std::vector<StridedBox> clipped(const StridedBox& box, std::int64_t begin, std::int64_t end);

/// Elements of one dense tensor, seen as another tensor. Immutable. All functions throw Error(invalid_argument) if the
/// dimension does not exist or the sizes do not match it.
class View {
 public:
  /// A view of the whole tensor.
  explicit View(const Shape& whole);
  [[nodiscard]] Shape shape() const;
  /// Exchanges the last two dimensions.
  [[nodiscard]] View transposed() const;
  /// Selects one index of the first dimension, and removes that dimension.
  [[nodiscard]] View item(std::int64_t index) const;
  /// Interprets the dimension as a tensor of these sizes, and selects the elements [begin, begin + count) of its
  /// dimension `along`.
  [[nodiscard]] View slice(std::int64_t dim, std::span<const std::int64_t> sizes, std::size_t along, std::int64_t begin,
                           std::int64_t count) const;
  /// Interprets the dimension as a tensor of these sizes, and reorders its dimensions.
  [[nodiscard]] View reordered(std::int64_t dim, std::span<const std::int64_t> sizes,
                               std::span<const std::size_t> order) const;
  /// Returns the box that copies the view to a dense tensor of its shape.
  [[nodiscard]] StridedBox box() const;

 private:
  struct ViewAxis {
    std::int64_t count = 1;
    std::int64_t stride = 0;
  };
  using Dimension = std::vector<ViewAxis>;  ///< the product of the counts is the size of the dimension
  [[nodiscard]] std::size_t place_of(std::int64_t dim) const;
  /// Splits the axes of a dimension so that they match `sizes`.
  [[nodiscard]] std::vector<Dimension> refined(std::size_t dim, std::span<const std::int64_t> sizes) const;
  std::int64_t offset_ = 0;
  std::vector<Dimension> dimensions_;
};

}  // namespace muster::merge

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Other shapes of one tensor's elements: slices, transposes, halves that lie interleaved. A view says where each of its
// elements lies; as a box it is a movement of data, which can be turned around. Nothing here touches elements.

#include <cstdint>
#include <span>
#include <vector>

#include "muster/tensor.hpp"

namespace muster::merge {

/// `count` elements, or groups of them, so far apart in the source and in the target.
struct BoxAxis {
  std::int64_t count = 1;
  std::int64_t from = 0;
  std::int64_t to = 0;
  friend bool operator==(const BoxAxis&, const BoxAxis&) = default;
};

/// Element from + sum(i * axis.from) of the source is element to + sum(i * axis.to) of the target. An element of the
/// target is met once.
struct Box {
  int source = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::vector<BoxAxis> axes;  ///< in descending order of `to`, each larger than what the later ones reach
  friend bool operator==(const Box&, const Box&) = default;
};

/// From the target to the source.
Box reversed(Box box);

/// What of a box lies in the elements [begin, end) of the target: at most two boxes for each axis.
std::vector<Box> clipped(const Box& box, std::int64_t begin, std::int64_t end);

/// Elements of one dense tensor, seen as another tensor. Immutable. All throw Error(argument) if the dimension is not
/// there or the sizes are not its own.
class View {
 public:
  /// All of it.
  explicit View(const Shape& whole);
  [[nodiscard]] Shape shape() const;
  /// The last two dimensions change places.
  [[nodiscard]] View transposed() const;
  /// One element of the first dimension, which goes.
  [[nodiscard]] View item(std::int64_t index) const;
  /// The dimension taken as a tensor of these sizes: of its dimension `along` the elements [begin, begin + count).
  [[nodiscard]] View slice(std::int64_t dim, std::span<const std::int64_t> sizes, std::size_t along, std::int64_t begin,
                           std::int64_t count) const;
  /// The dimension taken as a tensor of these sizes, whose dimensions come in another order.
  [[nodiscard]] View reordered(std::int64_t dim, std::span<const std::int64_t> sizes,
                               std::span<const std::size_t> order) const;
  /// To a dense tensor of this shape.
  [[nodiscard]] Box box() const;

 private:
  struct Axis {
    std::int64_t count = 1;
    std::int64_t stride = 0;
  };
  using Dimension = std::vector<Axis>;  ///< its product is the dimension's size
  [[nodiscard]] std::size_t place_of(std::int64_t dim) const;
  /// The axes of a dimension, cut so that they are those of sizes.
  [[nodiscard]] std::vector<Dimension> refined(std::size_t dim, std::span<const std::int64_t> sizes) const;
  std::int64_t offset_ = 0;
  std::vector<Dimension> dimensions_;
};

}  // namespace muster::merge

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that consist of boxes: their cover of the tensor, and their positions in bytes. These functions do not access
// elements.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/tensor.hpp"
#include "src/merge/layout.hpp"

namespace muster::merge {

/// A box of elements, as a view: its first element, and its extents. Both have one number per dimension.
struct BoxView {
  std::span<const std::int64_t> begin;
  std::span<const std::int64_t> extents;
};

/// As BoxView, with its own numbers.
struct OwnedBox {
  Shape begin;
  Shape extents;
  [[nodiscard]] BoxView view() const noexcept { return {begin, extents}; }
  friend bool operator==(const OwnedBox&, const OwnedBox&) = default;
};

/// Returns text such as "[0:4, 8:16]".
std::string box_text(const BoxView& box);

/// Returns the number of elements.
std::uint64_t volume(std::span<const std::int64_t> extents) noexcept;

/// Returns the strides of contiguous elements, with the last dimension innermost.
Strides row_major_strides(std::span<const std::int64_t> extents);

/// Whether the box is inside a tensor of this shape.
bool is_inside(const BoxView& box, std::span<const std::int64_t> whole) noexcept;

/// Returns the elements that two boxes of equally many dimensions have in common; without elements if they do not meet.
OwnedBox common_of(const BoxView& a, const BoxView& b);

/// Calls work(begin, extents) for boxes that together are the elements [first, first + count) in row-major order.
void for_boxes(std::span<const std::int64_t> extents, std::int64_t first, std::int64_t count,
               const std::function<void(const Shape&, const Shape&)>& work);

/// The cover of a tensor by boxes. Every element is in exactly one box if there are no overlaps, and `elements` is the
/// number of elements of the tensor.
struct Cover {
  std::uint64_t elements = 0;  ///< sum of the volumes of all boxes
  /// Pairs of boxes, by index, that have elements in common. The first index of a pair is the lower one.
  std::vector<std::pair<std::size_t, std::size_t>> overlaps;
  bool is_known = true;  ///< false if there are too many boxes to compare; `overlaps` is then incomplete
};
/// Ends at the first `most` overlaps. All boxes are inside the tensor.
Cover cover_of(std::span<const BoxView> boxes, std::size_t most);

/// A part of a source, as a box of the target.
struct SourceBox {
  int source = 0;
  OwnedBox box;  ///< in the target; inside `all`
  OwnedBox all;  ///< the box of all elements of the source, in the target
};

/// Elements that two sources have.
struct CommonBox {
  int source = 0;
  int other = 0;
  OwnedBox box;  ///< in the target
};

/// Cuts boxes that overlap earlier ones, so that no two of the result overlap. `overlaps` are those of cover_of().
/// Appends all elements that two boxes had in common to `common`.
std::vector<SourceBox> cut_overlaps(std::vector<SourceBox> boxes,
                                    std::span<const std::pair<std::size_t, std::size_t>> overlaps,
                                    std::vector<CommonBox>& common);

/// Returns the bytes of a target that `boxes` cover, each element once, as few bands. Throws Error(unsupported) if
/// packed elements of two boxes would share a byte.
std::vector<Band> bands_of(const TensorSpec& target, std::span<const SourceBox> boxes);

/// Returns the bytes of `box`, a box of the target inside `all`, in a source that has the elements `all`, as rows.
/// Consecutive rectangles are in row-major order of the elements. Their number and sizes depend on the target and the
/// box only. Their `to` is not set. Throws as bands_of.
std::vector<Rectangle> rows_in_source(const TensorSpec& target, const OwnedBox& box, const OwnedBox& all);

}  // namespace muster::merge

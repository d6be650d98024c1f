// SPDX-License-Identifier: Apache-2.0
#include "src/merge/view.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "muster/error.hpp"

namespace muster::merge {
namespace {

std::int64_t product_of(std::span<const std::int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

/// Removes axes of one element, and joins two adjacent axes that are contiguous on both sides.
void simplify(std::vector<BoxAxis>& axes) {
  std::vector<BoxAxis> few;
  for (const BoxAxis& axis : axes) {
    if (axis.count == 1) continue;
    if (!few.empty() && few.back().from == axis.count * axis.from && few.back().to == axis.count * axis.to)
      few.back() = {few.back().count * axis.count, axis.from, axis.to};
    else
      few.push_back(axis);
  }
  axes = std::move(few);
}

void clip(const StridedBox& box, std::size_t axis, std::int64_t begin, std::int64_t end, std::vector<StridedBox>& all) {
  // The number of target elements from box.to on that the axes from this one on span.
  std::int64_t reach = 1;
  for (std::size_t i = axis; i < box.axes.size(); ++i) reach += (box.axes[i].count - 1) * box.axes[i].to;
  if (box.to >= end || box.to + reach <= begin) return;
  if (box.to >= begin && box.to + reach <= end) {
    all.push_back(box);
    return;
  }
  const BoxAxis whole = box.axes[axis];
  const std::int64_t inner = reach - (whole.count - 1) * whole.to;
  // The first item that ends after `begin`, and the first item that begins at or after `end`.
  const std::int64_t before = begin - box.to - inner;
  const std::int64_t first = before < 0 ? 0 : before / whole.to + 1;
  const std::int64_t last = std::min(whole.count, (end - box.to + whole.to - 1) / whole.to);
  const auto part = [&](std::int64_t from, std::int64_t count) {
    StridedBox some = box;
    some.axes[axis].count = count;
    some.from += from * whole.from;
    some.to += from * whole.to;
    return some;
  };
  std::int64_t at = first;
  const auto is_inside = [&](std::int64_t index) {
    const std::int64_t to = box.to + index * whole.to;
    return to >= begin && to + inner <= end;
  };
  if (at < last && !is_inside(at)) clip(part(at++, 1), axis + 1, begin, end, all);
  std::int64_t stop = last;
  if (stop > at && !is_inside(stop - 1)) --stop;
  if (at < stop) all.push_back(part(at, stop - at));
  if (stop < last) clip(part(stop, 1), axis + 1, begin, end, all);
}

}  // namespace

StridedBox reversed(StridedBox box) {
  std::swap(box.from, box.to);
  for (BoxAxis& axis : box.axes) std::swap(axis.from, axis.to);
  std::ranges::stable_sort(box.axes, std::greater(), &BoxAxis::to);
  simplify(box.axes);
  return box;
}

std::vector<StridedBox> clipped(const StridedBox& box, std::int64_t begin, std::int64_t end) {
  std::vector<StridedBox> all;
  const bool is_empty = std::ranges::any_of(box.axes, [](const BoxAxis& axis) { return axis.count == 0; });
  if (begin < end && !is_empty) clip(box, 0, begin, end, all);
  for (StridedBox& part : all) simplify(part.axes);
  return all;
}

View::View(const Shape& whole) {
  std::int64_t stride = element_count(whole);
  for (const std::int64_t size : whole) {
    stride = size == 0 ? 0 : stride / size;
    dimensions_.push_back({{size, stride}});
  }
}

Shape View::shape() const {
  Shape shape;
  for (const Dimension& dimension : dimensions_)
    shape.push_back(std::accumulate(dimension.begin(), dimension.end(), std::int64_t{1},
                                    [](std::int64_t size, const ViewAxis& axis) { return size * axis.count; }));
  return shape;
}

std::size_t View::place_of(std::int64_t dim) const {
  const auto dimensions = static_cast<std::int64_t>(dimensions_.size());
  const std::int64_t place = dim < 0 ? dim + dimensions : dim;
  if (place < 0 || place >= dimensions)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("dimension {} is out of range for shape {}", dim, to_string(shape())));
  return static_cast<std::size_t>(place);
}

View View::transposed() const {
  View view = *this;
  std::swap(view.dimensions_[place_of(-1)], view.dimensions_[place_of(-2)]);
  return view;
}

View View::item(std::int64_t index) const {
  const std::size_t first = place_of(0);
  View view = slice(0, std::vector{shape()[first]}, 0, index, 1);
  view.dimensions_.erase(view.dimensions_.begin());
  return view;
}

std::vector<View::Dimension> View::refined(std::size_t dim, std::span<const std::int64_t> sizes) const {
  const std::int64_t size = shape()[dim];
  const auto refuse = [&] {
    throw Error(ErrorKind::invalid_argument, fmt::format("dimension {} of shape {} cannot be split into {}", dim,
                                                         to_string(shape()), fmt::join(sizes, " x ")));
  };
  if (product_of(sizes) != size) refuse();
  std::vector<ViewAxis> left = dimensions_[dim];
  std::vector<Dimension> groups(sizes.size());
  for (std::size_t i = sizes.size(); i-- > 0;) {
    std::int64_t wanted = sizes[i];
    Dimension& group = groups[i];
    while (wanted > 1) {
      while (!left.empty() && left.back().count == 1) left.pop_back();
      if (left.empty()) refuse();
      ViewAxis& axis = left.back();
      if (wanted % axis.count == 0) {
        wanted /= axis.count;
        group.insert(group.begin(), axis);
        left.pop_back();
      } else if (axis.count % wanted == 0) {
        group.insert(group.begin(), {wanted, axis.stride});
        axis = {axis.count / wanted, axis.stride * wanted};
        wanted = 1;
      } else {
        refuse();
      }
    }
    if (wanted == 0) refuse();
    if (group.empty()) group.push_back({1, 0});
  }
  return groups;
}

View View::slice(std::int64_t dim, std::span<const std::int64_t> sizes, std::size_t along, std::int64_t begin,
                 std::int64_t count) const {
  const std::size_t place = place_of(dim);
  std::vector<Dimension> groups = refined(place, sizes);
  Dimension& cut = groups[along];
  if (begin < 0 || count < 0 || begin > sizes[along] - count)
    throw Error(ErrorKind::invalid_argument, fmt::format("dimension {} of shape {}: elements [{}, {}) are out of range",
                                                         dim, to_string(shape()), begin, begin + count));
  View view = *this;
  if (count != sizes[along]) {
    // A range of elements is a range of one axis only if all elements have the same distance.
    if (cut.size() != 1)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("dimension {} of shape {}: the cut elements are not at equal distances", dim,
                              to_string(shape())));
    view.offset_ += begin * cut.front().stride;
    cut.front().count = count;
  }
  view.dimensions_[place].clear();
  for (const Dimension& group : groups)
    view.dimensions_[place].insert(view.dimensions_[place].end(), group.begin(), group.end());
  return view;
}

View View::reordered(std::int64_t dim, std::span<const std::int64_t> sizes, std::span<const std::size_t> order) const {
  const std::size_t place = place_of(dim);
  const std::vector<Dimension> groups = refined(place, sizes);
  View view = *this;
  view.dimensions_[place].clear();
  for (const std::size_t group : order)
    view.dimensions_[place].insert(view.dimensions_[place].end(), groups[group].begin(), groups[group].end());
  return view;
}

StridedBox View::box() const {
  StridedBox box{0, offset_, 0, {}};
  std::int64_t stride = element_count(shape());
  for (const Dimension& dimension : dimensions_)
    for (const ViewAxis& axis : dimension) {
      stride = axis.count == 0 ? 0 : stride / axis.count;
      box.axes.push_back({axis.count, axis.stride, stride});
    }
  if (element_count(shape()) == 0)
    box.axes = {{0, 0, 0}};
  else
    simplify(box.axes);
  return box;
}

}  // namespace muster::merge

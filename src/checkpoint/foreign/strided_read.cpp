// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/foreign/strided_read.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

namespace muster::foreign {
namespace {

constexpr std::uint64_t longest_stretch = 4 << 20;
constexpr std::uint64_t short_stretch = 256 << 10;  // is read whatever is wanted of it
constexpr std::uint64_t worth_reading = 8;          // one of so many bytes has to be wanted
constexpr std::uint64_t long_run = 128 << 10;       // is worth a call of its own

template <std::size_t Item>
void copy_axes(const std::byte* from, std::span<const StridedAxis> axes, std::byte* to) {
  if (axes.empty()) {
    std::memcpy(to, from, Item);
    return;
  }
  const StridedAxis axis = axes.front();
  if (axes.size() == 1) {
    for (std::uint64_t i = 0; i < axis.count; ++i) std::memcpy(to + i * axis.to, from + i * axis.from, Item);
    return;
  }
  for (std::uint64_t i = 0; i < axis.count; ++i)
    copy_axes<Item>(from + i * axis.from, axes.subspan(1), to + i * axis.to);
}

void copy_items(const std::byte* from, std::span<const StridedAxis> axes, std::size_t item, std::byte* to) {
  switch (item) {
    case 1:
      return copy_axes<1>(from, axes, to);
    case 2:
      return copy_axes<2>(from, axes, to);
    case 4:
      return copy_axes<4>(from, axes, to);
    default:
      return copy_axes<8>(from, axes, to);
  }
}

/// The farthest first; those that are one in the file and in memory become one.
void simplify(std::vector<StridedAxis>& axes) {
  std::erase_if(axes, [](const StridedAxis& axis) { return axis.count == 1; });
  std::ranges::stable_sort(axes, std::greater(), &StridedAxis::from);
  std::vector<StridedAxis> merged;
  for (const StridedAxis& axis : axes) {
    const auto follows = [&](const StridedAxis& outer) {
      return outer.from == axis.from * axis.count && outer.to == axis.to * axis.count;
    };
    if (!merged.empty() && follows(merged.back()))
      merged.back() = {merged.back().count * axis.count, axis.from, axis.to};
    else
      merged.push_back(axis);
  }
  axes = std::move(merged);
}

}  // namespace

void read_strided(const formats::ReadAt& read, std::uint64_t begin, std::vector<StridedAxis> axes, std::size_t item,
                  std::byte* target) {
  if (std::ranges::any_of(axes, [](const StridedAxis& axis) { return axis.count == 0; })) return;
  simplify(axes);
  const bool is_run = !axes.empty() && axes.back().from == item && axes.back().to == item;
  const std::uint64_t run = is_run ? axes.back().count * item : item;
  if (axes.size() == (is_run ? 1U : 0U)) return read(begin, {target, run});
  std::uint64_t stretch = item;
  std::uint64_t wanted = item;
  for (const StridedAxis& axis : axes) {
    stretch += (axis.count - 1) * axis.from;
    if (axis.from != 0) wanted *= axis.count;
  }
  const bool is_dense = stretch <= short_stretch || stretch / worth_reading <= wanted;
  if (stretch <= longest_stretch && is_dense && run < long_run) {
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(stretch);
    read(begin, {memory.get(), stretch});
    return copy_items(memory.get(), axes, item, target);
  }
  // In halves, along what is farthest apart.
  const StridedAxis far = axes.front();
  axes.front().count = far.count / 2;
  read_strided(read, begin, axes, item, target);
  axes.front().count = far.count - far.count / 2;
  read_strided(read, begin + far.count / 2 * far.from, std::move(axes), item, target + far.count / 2 * far.to);
}

}  // namespace muster::foreign

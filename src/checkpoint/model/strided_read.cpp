// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/model/strided_read.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace muster {
namespace {

constexpr std::uint64_t longest_stretch = 1 << 20;
// the number of contiguous bytes that take as long to read as one additional call
constexpr std::uint64_t worth_a_call = 16 << 10;

/// Copies items of `Size` bytes; 0: of `item` bytes.
template <std::size_t Size>
void copy_axes(const std::byte* from, std::span<const StridedAxis> axes, std::size_t item, std::byte* to) {
  if (axes.empty()) {
    std::memcpy(to, from, Size == 0 ? item : Size);
    return;
  }
  const StridedAxis axis = axes.front();
  if (axes.size() == 1) {
    for (std::uint64_t i = 0; i < axis.count; ++i)
      std::memcpy(to + i * axis.to, from + i * axis.from, Size == 0 ? item : Size);
    return;
  }
  for (std::uint64_t i = 0; i < axis.count; ++i)
    copy_axes<Size>(from + i * axis.from, axes.subspan(1), item, to + i * axis.to);
}

/// Sorts axes by stride, the largest first, and joins those that are contiguous in the file and in memory.
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

void read_parts(const formats::ReadAt& read, std::uint64_t begin, std::vector<StridedAxis> axes, std::size_t item,
                std::byte* target, std::vector<std::byte>& memory) {
  simplify(axes);
  if (!axes.empty() && axes.back().from == item && axes.back().to == item) {
    item *= axes.back().count;
    axes.pop_back();
  }
  if (axes.empty()) return read(begin, {target, item});
  // Runs that are contiguous in the file, but not necessarily in memory.
  std::uint64_t run = item;
  std::uint64_t runs = 1;
  std::uint64_t stretch = item;
  for (const StridedAxis& axis : axes) {
    stretch += (axis.count - 1) * axis.from;
    if (axis.from == item)
      run = item * axis.count;
    else
      runs *= axis.count;
  }
  if (stretch <= longest_stretch && stretch / runs <= std::max(run, worth_a_call) && item < worth_a_call) {
    memory.resize(std::max<std::size_t>(memory.size(), stretch));
    read(begin, std::span(memory).first(stretch));
    return copy_strided(memory.data(), std::move(axes), item, target);
  }
  // Splits in half along the axis with the largest stride.
  const StridedAxis far = axes.front();
  axes.front().count = far.count / 2;
  read_parts(read, begin, axes, item, target, memory);
  axes.front().count = far.count - far.count / 2;
  read_parts(read, begin + far.count / 2 * far.from, std::move(axes), item, target + far.count / 2 * far.to, memory);
}

}  // namespace

void copy_strided(const std::byte* from, std::vector<StridedAxis> axes, std::size_t item, std::byte* to) {
  // Consecutive writes are then close together in the cache.
  std::ranges::stable_sort(axes, std::greater(), &StridedAxis::to);
  switch (item) {
    case 1:
      return copy_axes<1>(from, axes, item, to);
    case 2:
      return copy_axes<2>(from, axes, item, to);
    case 4:
      return copy_axes<4>(from, axes, item, to);
    case 8:
      return copy_axes<8>(from, axes, item, to);
    default:
      return copy_axes<0>(from, axes, item, to);
  }
}

bool is_within(std::uint64_t begin, std::span<const StridedAxis> axes, std::size_t item, std::uint64_t size) noexcept {
  if (std::ranges::any_of(axes, [](const StridedAxis& axis) { return axis.count == 0; })) return true;
  std::uint64_t reach = item;
  for (const StridedAxis& axis : axes) {
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(axis.count - 1, axis.from, &step) || __builtin_add_overflow(reach, step, &reach))
      return false;
  }
  return begin <= size && reach <= size - begin;
}

void read_strided(const formats::ReadAt& read, std::uint64_t begin, std::vector<StridedAxis> axes, std::size_t item,
                  std::byte* target) {
  if (std::ranges::any_of(axes, [](const StridedAxis& axis) { return axis.count == 0; })) return;
  std::vector<std::byte> memory;
  read_parts(read, begin, std::move(axes), item, target, memory);
}

}  // namespace muster

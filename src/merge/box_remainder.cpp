// SPDX-License-Identifier: Apache-2.0
#include "src/merge/box_remainder.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <span>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/crc64.hpp"

namespace muster::merge {
namespace {

/// `count` equal parts, with their distances in bytes.
struct Level {
  std::int64_t count = 1;
  std::int64_t in_memory = 0;
  std::uint64_t in_tensor = 0;
};

/// Runs of bytes that are contiguous both in memory and in the tensor.
struct Runs {
  std::size_t bytes = 0;
  std::vector<Level> levels = {};  // innermost first
  std::uint64_t end = 0;           // of the last run, in the tensor
  std::uint64_t tensor_bytes = 0;
};

Runs runs_of(const PlacedBox& box) {
  const TensorView& view = box.view;
  const auto item = static_cast<std::int64_t>(itemsize(view.dtype()));
  Runs runs{.bytes = static_cast<std::size_t>(item)};
  std::int64_t begin = 0;
  std::int64_t in_tensor = item;
  std::int64_t dense = item;
  for (std::size_t dim = box.whole.size(); dim-- > 0;) {
    const std::int64_t count = view.shape()[dim];
    const std::int64_t in_memory = view.is_contiguous() ? dense : view.strides()[dim] * item;
    begin += (box.begin[dim] + count - 1) * in_tensor;
    const auto step = static_cast<std::uint64_t>(in_tensor);
    if (count != 1) {
      Level* const inner = runs.levels.empty() ? nullptr : &runs.levels.back();
      if (inner == nullptr && std::cmp_equal(in_memory, runs.bytes) && step == runs.bytes)
        runs.bytes *= static_cast<std::size_t>(count);
      else if (inner != nullptr && in_memory == inner->count * inner->in_memory &&
               step == static_cast<std::uint64_t>(inner->count) * inner->in_tensor)
        inner->count *= count;
      else
        runs.levels.push_back({count, in_memory, step});
    }
    in_tensor *= box.whole[dim];
    dense *= count;
  }
  runs.end = static_cast<std::uint64_t>(begin + item);
  runs.tensor_bytes = static_cast<std::uint64_t>(in_tensor);
  return runs;
}

/// Returns the remainder up to the end of the last run. Horner's method: runs of one level have equal distances, so
/// each needs one multiplication.
std::uint64_t remainder_of(const Runs& runs, std::span<const Crc64Shift> shifts, const std::byte* data) {
  if (shifts.empty()) return crc64_remainder({data, runs.bytes});
  const std::size_t level = shifts.size() - 1;
  std::uint64_t remainder = 0;
  for (std::int64_t i = 0; i < runs.levels[level].count; ++i)
    remainder =
        shifts[level](remainder) ^ remainder_of(runs, shifts.first(level), data + i * runs.levels[level].in_memory);
  return remainder;
}

bool has_rows(const TensorView& view) {
  return view.is_contiguous() || view.strides().back() == 1 || view.shape().back() == 1;
}

}  // namespace

PlacedBox in_bytes(PlacedBox box, std::string_view name) {
  const DType dtype = box.view.dtype();
  if (!is_packed(dtype)) return box;
  Shape shape = box.view.shape();
  if (shape == box.whole) {
    // Also a tensor whose last byte is not full.
    const auto bytes = static_cast<std::int64_t>(box.view.nbytes());
    return {{DType::u8, {bytes}, box.view.data(), {}, box.view.device()}, {bytes}, {0}};
  }
  // The box is contiguous in memory, so dimensions that it has completely become part of the one before them.
  while (shape.size() > 1 && shape.back() == box.whole.back()) {
    const std::int64_t count = shape.back();
    for (Shape* const each : {&shape, &box.whole, &box.begin}) {
      each->pop_back();
      each->back() *= count;
    }
  }
  for (Shape* const each : {&shape, &box.whole, &box.begin}) {
    std::int64_t& last = each->back();
    if (last % elements_in_group(dtype) != 0)
      throw Error(
          ErrorKind::unsupported,
          fmt::format("tensor {}: packed elements of different parts would share a byte. Split another dimension",
                      in_quotes(name)));
    last = last * bits(dtype) / 8;
  }
  box.view = {DType::u8, std::move(shape), box.view.data(), {}, box.view.device()};
  return box;
}

void cut_box(PlacedBox box, std::size_t most, std::vector<PlacedBox>& pieces) {
  const Shape& shape = box.view.shape();
  if (box.view.nbytes() <= most || box.view.element_count() == 1) {
    if (box.view.element_count() != 0) pieces.push_back(std::move(box));
    return;
  }
  // Elements that are scattered in memory are copied, which is fastest for pieces of similar extents.
  const auto dim = static_cast<std::size_t>(
      (has_rows(box.view) ? std::ranges::find_if(shape, [](std::int64_t count) { return count > 1; })
                          : std::ranges::max_element(shape)) -
      shape.begin());
  const std::int64_t middle = shape[dim] / 2;
  PlacedBox second{box.view.slice(dim, middle, shape[dim]), box.whole, box.begin};
  second.begin[dim] += middle;
  box.view = box.view.slice(dim, 0, middle);
  cut_box(std::move(box), most, pieces);
  cut_box(std::move(second), most, pieces);
}

std::uint64_t box_remainder(const PlacedBox& box, std::vector<std::byte>& memory) {
  if (box.view.element_count() == 0) return 0;
  if (!has_rows(box.view)) {
    if (memory.size() < box.view.nbytes()) memory.resize(box.view.nbytes());
    copy_contiguous(box.view, memory.data());
    return box_remainder({{box.view.dtype(), box.view.shape(), memory.data()}, box.whole, box.begin}, memory);
  }
  const Runs runs = runs_of(box);
  std::vector<Crc64Shift> shifts;
  shifts.reserve(runs.levels.size());
  for (const Level& level : runs.levels) shifts.emplace_back(level.in_tensor);
  return crc64_shifted(remainder_of(runs, shifts, box.view.host_data()), runs.tensor_bytes - runs.end);
}

}  // namespace muster::merge

// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/viewed_tensors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/merge/cast.hpp"

namespace muster {
namespace {

// Longer runs are worth a system call each; shorter ones are read with what lies between them, so much at once.
constexpr std::uint64_t long_piece = 4 << 10;
constexpr std::uint64_t span_bytes = 1 << 20;

/// Elements of `size` bytes, from one distance to another.
template <std::size_t size>
void scatter(const std::byte* from, std::byte* to, const merge::BoxAxis& outer, const merge::BoxAxis& inner) {
  for (std::int64_t i = 0; i < outer.count; ++i)
    for (std::int64_t j = 0; j < inner.count; ++j)
      std::memcpy(to + (i * outer.to + j * inner.to) * static_cast<std::int64_t>(size),
                  from + (i * outer.from + j * inner.from) * static_cast<std::int64_t>(size), size);
}

void scatter(std::uint64_t size, const std::byte* from, std::byte* to, merge::BoxAxis outer, merge::BoxAxis inner) {
  // What is written one after the other is in the cache.
  if (outer.to < inner.to) std::swap(outer, inner);
  switch (size) {
    case 1:
      return scatter<1>(from, to, outer, inner);
    case 2:
      return scatter<2>(from, to, outer, inner);
    case 4:
      return scatter<4>(from, to, outer, inner);
    default:
      return scatter<8>(from, to, outer, inner);
  }
}

}  // namespace

ViewedTensors::ViewedTensors(const TensorSource& source, std::vector<ViewedTensor> tensors)
    : source_(source), tensors_(std::move(tensors)) {
  for (const ViewedTensor& tensor : tensors_)
    entries_.push_back(
        {tensor.name, tensor.spec.dtype, tensor.spec.shape, 0, byte_size(tensor.spec.dtype, tensor.spec.shape)});
}

ViewedTensors::ViewedTensors(std::shared_ptr<const TensorSource> source, std::vector<ViewedTensor> tensors)
    : ViewedTensors(*source, std::move(tensors)) {
  owner_ = std::move(source);
}

void ViewedTensors::read(std::size_t place, std::uint64_t offset, std::span<std::byte> target) const {
  const ViewedTensor& tensor = tensors_[place];
  // A whole tensor as it is, packed elements too.
  if (tensor.boxes.empty()) return;
  if (is_packed(tensor.spec.dtype)) {
    source_.read(static_cast<std::size_t>(tensor.boxes.front().source), offset, target);
    return;
  }
  const std::uint64_t size = itemsize(tensor.spec.dtype);
  const std::uint64_t stored = itemsize(tensor.stored);
  const auto begin = static_cast<std::int64_t>(offset / size);
  const std::uint64_t count = target.size() / size;
  std::vector<std::byte> memory;
  std::span<std::byte> elements = target;
  const bool is_cast = tensor.stored != tensor.spec.dtype;
  if (is_cast) {
    memory.resize(count * stored);
    elements = memory;
  }
  for (const merge::Box& box : tensor.boxes)
    for (const merge::Box& part : merge::clipped(box, begin, begin + static_cast<std::int64_t>(count)))
      copy(tensor, part, begin, elements);
  if (!is_cast) return;
  const auto infinite = merge::cast(tensor.stored, memory, tensor.spec.dtype, target);
  if (infinite && !tensor.may_overflow)
    throw Error(ErrorKind::argument,
                fmt::format("casting the tensor {} from {} to {}: element {} is finite and would become infinite; take "
                            "another dtype, or allow it (\"overflow\": true)",
                            in_quotes(tensor.name), to_string(tensor.stored), to_string(tensor.spec.dtype),
                            static_cast<std::uint64_t>(begin) + *infinite));
}

void ViewedTensors::copy(const ViewedTensor& tensor, const merge::Box& box, std::int64_t begin,
                         std::span<std::byte> target) const {
  const std::uint64_t size = itemsize(tensor.stored);
  const auto source = static_cast<std::size_t>(box.source);
  // In the order in which they lie: runs of elements, rows of runs, and whatever is around those.
  std::vector<merge::BoxAxis> axes = box.axes;
  std::ranges::stable_sort(axes, std::greater(), &merge::BoxAxis::from);
  const auto take = [&](bool is_wanted) {
    if (axes.empty() || !is_wanted) return merge::BoxAxis{};
    const merge::BoxAxis last = axes.back();
    axes.pop_back();
    return last;
  };
  const merge::BoxAxis run = take(!axes.empty() && axes.back().from == 1);
  const merge::BoxAxis rows = take(true);
  const auto run_bytes = static_cast<std::uint64_t>(run.count) * size;
  const auto distance = static_cast<std::uint64_t>(rows.from) * size;
  const bool is_apart = run_bytes >= long_piece || distance >= span_bytes / 2 || rows.count == 1;
  const std::int64_t at_once =
      is_apart ? 1 : std::min(rows.count, static_cast<std::int64_t>(span_bytes / std::max<std::uint64_t>(distance, 1)));
  std::vector<std::byte> memory;
  std::vector<std::int64_t> index(axes.size(), 0);
  const auto check = [&](std::int64_t from, std::uint64_t bytes) {
    const std::uint64_t whole = source_.tensors().at(source).bytes;
    if (from < 0 || static_cast<std::uint64_t>(from) * size > whole ||
        bytes > whole - static_cast<std::uint64_t>(from) * size)
      throw Error(ErrorKind::corrupt,
                  fmt::format("a part of the tensor {} lies outside of what it is made of", in_quotes(tensor.name)));
  };
  while (true) {
    std::int64_t from = box.from;
    std::int64_t to = box.to - begin;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      from += index[i] * axes[i].from;
      to += index[i] * axes[i].to;
    }
    for (std::int64_t row = 0; row < rows.count; row += at_once) {
      const std::int64_t now = std::min(at_once, rows.count - row);
      const std::int64_t first = from + row * rows.from;
      std::byte* const place = target.data() + (to + row * rows.to) * static_cast<std::int64_t>(size);
      const std::uint64_t bytes = static_cast<std::uint64_t>(now - 1) * distance + run_bytes;
      check(first, bytes);
      const auto at = static_cast<std::uint64_t>(first) * size;
      if (now == 1 && (run.count == 1 || run.to == 1)) {
        source_.read(source, at, {place, run_bytes});
      } else {
        memory.resize(std::max<std::size_t>(memory.size(), bytes));
        source_.read(source, at, std::span(memory).first(bytes));
        scatter(size, memory.data(), place, {now, rows.from, rows.to}, run);
      }
    }
    std::size_t axis = axes.size();
    while (axis > 0 && ++index[axis - 1] == axes[axis - 1].count) index[--axis] = 0;
    if (axis == 0) return;
  }
}

TensorDetail ViewedTensors::detail(std::size_t tensor) const {
  TensorDetail detail;
  std::set<std::string_view> files;
  for (const merge::Box& box : tensors_[tensor].boxes)
    files.insert(source_.detail(static_cast<std::size_t>(box.source)).file);
  if (files.size() == 1) detail.file = *files.begin();
  detail.stored_bytes = entries_[tensor].bytes;
  return detail;
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/viewed_tensors.hpp"

#include <fmt/core.h>

#include <set>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/strided_read.hpp"
#include "src/merge/cast.hpp"

namespace muster {
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
  // A whole tensor without a change, which may have packed elements.
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
  const std::uint64_t first = static_cast<std::uint64_t>(box.from) * size;
  std::vector<StridedAxis> axes;
  for (const merge::BoxAxis& axis : box.axes)
    axes.push_back({static_cast<std::uint64_t>(axis.count), static_cast<std::uint64_t>(axis.from) * size,
                    static_cast<std::uint64_t>(axis.to) * size});
  if (box.from < 0 || !is_within(first, axes, size, source_.tensors().at(source).bytes))
    throw Error(ErrorKind::corrupt,
                fmt::format("a part of the tensor {} lies outside of what it is made of", in_quotes(tensor.name)));
  read_strided([&](std::uint64_t at, std::span<std::byte> bytes) { source_.read(source, at, bytes); }, first,
               std::move(axes), size, target.data() + static_cast<std::uint64_t>(box.to - begin) * size);
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

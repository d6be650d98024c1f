// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/plan/viewed_tensors.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/strided_read.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
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
  for (const merge::StridedBox& box : tensor.boxes)
    for (const merge::StridedBox& part : merge::clipped(box, begin, begin + static_cast<std::int64_t>(count)))
      copy(tensor, part, begin, elements);
  if (!is_cast) return;
  const auto infinite = merge::cast(tensor.stored, memory, tensor.spec.dtype, target);
  if (infinite && !tensor.may_overflow)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {}: casting from {} to {}: element {} is finite and would become infinite. Use "
                            "another dtype, or allow it with \"overflow\": true",
                            in_quotes(tensor.name), to_string(tensor.stored), to_string(tensor.spec.dtype),
                            static_cast<std::uint64_t>(begin) + *infinite));
}

void ViewedTensors::copy(const ViewedTensor& tensor, const merge::StridedBox& box, std::int64_t begin,
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
                fmt::format("tensor {}: a part is out of range of its source", in_quotes(tensor.name)));
  read_strided([&](std::uint64_t at, std::span<std::byte> bytes) { source_.read(source, at, bytes); }, first,
               std::move(axes), size, target.data() + static_cast<std::uint64_t>(box.to - begin) * size);
}

TensorDetail ViewedTensors::detail(std::size_t tensor) const {
  TensorDetail detail;
  std::set<std::string_view> files;
  for (const merge::StridedBox& box : tensors_[tensor].boxes)
    files.insert(source_.detail(static_cast<std::size_t>(box.source)).file);
  if (files.size() == 1) detail.file = *files.begin();
  detail.stored_bytes = entries_[tensor].bytes;
  return detail;
}

namespace {

/// Returns true for scales in modules without a packed weight: those of the key-value cache and of simulated
/// quantisation.
bool is_scale_by_name(std::string_view leaf) {
  constexpr std::array<std::string_view, 7> leaves = {"_amax",    "k_scale",    "v_scale",          "q_scale",
                                                      "kv_scale", "prob_scale", "prob_output_scale"};
  return std::ranges::find(leaves, leaf) != leaves.end();
}

std::string_view leaf_of(std::string_view name) {
  return name.substr(name.rfind('.') + 1);  // npos + 1 is 0
}

/// Returns true for quantised dtypes, and for matrices and weights of 8 to 32 bit integers. Other integer tensors are
/// not packed: positions and counters have 64 bits, and masks have names of biases.
bool has_packed_elements(const NamedSpec& tensor) {
  const DType dtype = tensor.spec.dtype;
  if (is_quantised_dtype(dtype)) return true;
  const bool is_integer = dtype == DType::i8 || dtype == DType::u8 || dtype == DType::i16 || dtype == DType::i32;
  const std::string_view leaf = leaf_of(tensor.name);
  return is_integer && !leaf.ends_with("bias") && !leaf.ends_with("_ids") &&
         (tensor.spec.shape.size() >= 2 || leaf.find("weight") != std::string_view::npos);
}

}  // namespace

bool is_quantised_dtype(DType dtype) {
  const std::string_view name = to_string(dtype);
  return name.starts_with("F8") || name.starts_with("F4") || name.starts_with("F6") || is_packed(dtype);
}

std::string_view module_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

PackedParts::PackedParts(std::span<const NamedSpec> model) {
  for (const NamedSpec& tensor : model)
    if (has_packed_elements(tensor)) modules_.emplace(module_of(tensor.name));
}

bool PackedParts::is_in_packed_module(std::string_view name) const {
  const std::string_view module = module_of(name);
  return modules_.contains(module) || (!module.empty() && modules_.contains(module_of(module)));
}

bool PackedParts::has(const NamedSpec& tensor) const {
  if (has_packed_elements(tensor)) return true;
  const std::string_view leaf = leaf_of(tensor.name);
  if (is_scale_by_name(leaf) || !weights_of_scale(tensor.name).empty()) return true;
  return leaf != "bias" && !leaf.ends_with("_bias") && is_in_packed_module(tensor.name);
}

}  // namespace muster

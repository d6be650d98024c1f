// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/arguments.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "src/merge/reduce.hpp"

namespace muster::collectives {

merge::Combine combine_of(ReduceOp op) {
  using merge::Combine;
  constexpr std::array<Combine, 5> all = {Combine::sum, Combine::product, Combine::min, Combine::max, Combine::average};
  const auto number = static_cast<std::size_t>(op);
  if (number >= all.size()) throw Error(ErrorKind::invalid_argument, "ReduceOp: unknown operation");
  return all[number];
}

std::uint64_t What::hash() const {
  const auto number = [](const auto& value) { return value ? static_cast<std::uint64_t>(*value) + 1 : 0; };
  const std::array facts{XXH3_64bits(name, std::strlen(name)), number(op),  number(root),
                         static_cast<std::uint64_t>(dtype),    number(dim), std::uint64_t{slices.size()}};
  std::uint64_t hash = XXH3_64bits(facts.data(), sizeof facts);
  const auto add = [&](std::span<const std::int64_t> numbers) {
    hash = XXH3_64bits_withSeed(numbers.data(), numbers.size_bytes(), hash);
  };
  if (shape == nullptr) return hash;
  const std::span<const std::int64_t> all(*shape);
  add(all.first(varies ? *dim : all.size()));
  if (varies) add(all.subspan(*dim + 1));
  if (!slices.empty()) add(slices);
  return hash;
}

std::string What::words() const {
  std::string text = name;
  if (op) text += fmt::format("({})", merge::name_of(combine_of(*op)));
  if (root) text += fmt::format(", root {}", *root);
  if (shape != nullptr) text += fmt::format(" of {} {}", to_string(dtype), to_string(*shape));
  if (dim) text += fmt::format(" along dimension {}", *dim);
  if (!slices.empty()) text += fmt::format(" in slices {}", to_string(Shape(slices.begin(), slices.end())));
  return text;
}

std::size_t dimension(const Shape& shape, int dim) {
  const auto dims = static_cast<int>(shape.size());
  if (dim < -dims || dim >= dims)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("dimension {} is out of range for shape {}", dim, to_string(shape)));
  return static_cast<std::size_t>(dim < 0 ? dim + dims : dim);
}

std::uint64_t rows_before(const Shape& shape, std::size_t dim) {
  return static_cast<std::uint64_t>(std::accumulate(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(dim),
                                                    std::int64_t{1}, std::multiplies{}));
}

void check_whole_bytes(DType dtype, const Shape& shape, std::size_t dim) {
  if (!is_packed(dtype)) return;
  std::int64_t row = 1;
  for (std::size_t i = dim; i < shape.size(); ++i) row *= shape[i];
  if (row % elements_in_group(dtype) != 0)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {}: it cannot be joined or cut along dimension {}: its rows end within a byte",
                            to_string(TensorSpec{dtype, shape}), dim));
}

void cut(const Shape& shape, std::size_t dim, std::size_t ranks, std::optional<std::span<const std::int64_t>> sizes,
         std::vector<std::int64_t>& extents) {
  const std::int64_t extent = shape[dim];
  const auto count = static_cast<std::int64_t>(ranks);
  if (!sizes) {
    if (extent % count != 0)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("dimension {} of shape {} is not a multiple of {} ranks", dim, to_string(shape), ranks));
    extents.assign(ranks, extent / count);
    return;
  }
  bool fits = sizes->size() == ranks;
  std::int64_t left = extent;
  for (const std::int64_t size : *sizes) {
    fits = fits && size >= 0 && size <= left;
    if (fits) left -= size;
  }
  if (!fits || left != 0)
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format(
            "{} slices do not add up to dimension {} of shape {} for {} ranks: expected one per rank, none negative",
            sizes->size(), dim, to_string(shape), ranks));
  extents.assign(sizes->begin(), sizes->end());
}

Shape with_extent(Shape shape, std::size_t dim, std::int64_t extent) {
  shape[dim] = extent;
  return shape;
}

void check_on_host(const TensorView& tensor, const char* call) {
  if (!tensor.device().is_host())
    throw Error(
        ErrorKind::unsupported,
        fmt::format(
            "the tensor of shape {} is on {}, but {} needs host memory. Copy it to the host first (copy_to_host)",
            to_string(tensor.shape()), to_string(tensor.device()), call));
}

Bytes bytes_of(const TensorView& tensor, const DeviceBackend* device) {
  return device == nullptr ? tensor.bytes() : device->bytes_of(tensor);
}

Room room_of(const Tensor& tensor, const DeviceBackend* device) {
  if (!tensor.view().is_contiguous()) throw Error(ErrorKind::invalid_argument, "result: it must be contiguous");
  (void)bytes_of(tensor, device);
  if (tensor.nbytes() == 0) return {};
  return {tensor.mutable_data(), tensor.nbytes()};
}

void check_result(const Tensor& result, const TensorView& tensor, std::size_t dim, std::int64_t extent) {
  const Shape& its = result.shape();
  const Shape& shape = tensor.shape();
  bool fits = result.dtype() == tensor.dtype() && its.size() == shape.size();
  for (std::size_t i = 0; i < its.size() && fits; ++i) fits = its[i] == (i == dim ? extent : shape[i]);
  if (!fits)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("result: it is {}, expected {}", to_string(TensorSpec{result.dtype(), its}),
                            to_string(TensorSpec{tensor.dtype(), with_extent(shape, dim, extent)})));
}

Tensor new_result(DType dtype, Shape shape, DeviceBackend* device) {
  return device != nullptr ? device->allocate(dtype, std::move(shape)) : Tensor::allocate(dtype, std::move(shape));
}

void check_same(const TensorView& tensor, const TensorView& other, const char* which) {
  if (tensor.dtype() == other.dtype() && tensor.shape() == other.shape()) return;
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{} is {} {}, and the tensor is {} {}", which, to_string(tensor.dtype()),
                          to_string(tensor.shape()), to_string(other.dtype()), to_string(other.shape())));
}

Contiguous::Contiguous(const TensorView& tensor, const DeviceBackend* device) {
  if (device != nullptr) {
    bytes_ = device->bytes_of(tensor);
    return;
  }
  (void)tensor.host_data();
  if (!tensor.is_contiguous()) copy_ = Tensor::copy_of(tensor);
  bytes_ = copy_ ? copy_->bytes() : tensor.bytes();
}

Contiguous::Contiguous(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents,
                       DeviceBackend* device) {
  if (rows_before(tensor.shape(), dim) <= 1) {
    *this = Contiguous(tensor, device);
    return;
  }
  if (device != nullptr) {
    copy_ = device->cut(tensor, dim, extents);
    bytes_ = device->bytes_of(*copy_);
    return;
  }
  (void)tensor.host_data();
  copy_ = Tensor::allocate(tensor.dtype(), tensor.shape());
  std::byte* to = copy_->mutable_data();
  std::int64_t begin = 0;
  for (const std::int64_t extent : extents) {
    const TensorView slice = tensor.slice(dim, begin, begin + extent);
    copy_contiguous(slice, to);
    to += slice.nbytes();
    begin += extent;
  }
  bytes_ = copy_->bytes();
}

void join_parts(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows, const Tensor& whole) {
  const std::uint64_t stride = parts.nbytes() / rows;
  const std::byte* from = parts.data();
  std::byte* begin = whole.mutable_data();
  for (const std::uint64_t size : sizes) {
    const std::uint64_t bytes = size / rows;
    for (std::uint64_t row = 0; row < rows && bytes != 0; ++row, from += bytes)
      std::memcpy(begin + row * stride, from, bytes);
    begin += bytes;
  }
}

}  // namespace muster::collectives

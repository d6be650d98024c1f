// SPDX-License-Identifier: Apache-2.0
#include "muster/tensor.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "muster/error.hpp"

namespace muster {
namespace {

constexpr std::size_t alignment = 64;

[[noreturn]] void too_large(const Shape& shape) {
  throw Error(ErrorKind::argument, "a tensor of shape " + to_string(shape) + " has more bytes than 63 bits can count");
}

Strides row_major(const Shape& shape) {
  Strides strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    strides[dim] = step;
    step *= std::max<std::int64_t>(shape[dim], 1);
  }
  return strides;
}

/// Dimensions of one element do not move: their strides mean nothing.
bool is_row_major(const Shape& shape, const Strides& strides) {
  std::int64_t step = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    if (shape[dim] != 1 && strides[dim] != step) return false;
    step *= shape[dim];
  }
  return true;
}

/// A strided layout with as few dimensions as it can be told in, in bytes.
struct Layout {
  std::vector<std::int64_t> extents;
  std::vector<std::int64_t> steps;
};

Layout merged_layout(const TensorView& view) {
  const auto item = static_cast<std::int64_t>(itemsize(view.dtype()));
  const Strides strides = view.is_contiguous() ? row_major(view.shape()) : view.strides();
  Layout layout;
  for (std::size_t dim = 0; dim < view.shape().size(); ++dim) {
    const std::int64_t extent = view.shape()[dim];
    const std::int64_t step = strides[dim] * item;
    if (extent == 1) continue;
    if (!layout.extents.empty() && layout.steps.back() == step * extent) {
      layout.extents.back() *= extent;
      layout.steps.back() = step;
    } else {
      layout.extents.push_back(extent);
      layout.steps.push_back(step);
    }
  }
  return layout;
}

/// `count` elements that lie `step` bytes apart, side by side.
template <std::size_t Item>
void copy_row(std::byte* target, const std::byte* source, std::int64_t count, std::int64_t step) {
  for (std::int64_t i = 0; i < count; ++i, target += Item, source += step) std::memcpy(target, source, Item);
}

class StridedCopy {
 public:
  explicit StridedCopy(const TensorView& source) : layout_(merged_layout(source)), item_(itemsize(source.dtype())) {
    if (layout_.extents.empty()) layout_ = {{1}, {static_cast<std::int64_t>(item_)}};
  }
  void run(std::byte* target, const std::byte* source) { dimension(0, target, source); }

 private:
  std::byte* dimension(std::size_t dim, std::byte* target, const std::byte* source) {
    const std::int64_t extent = layout_.extents[dim];
    const std::int64_t step = layout_.steps[dim];
    if (dim + 1 == layout_.extents.size()) {
      row(target, source, extent, step);
      return target + static_cast<std::size_t>(extent) * item_;
    }
    for (std::int64_t i = 0; i < extent; ++i) target = dimension(dim + 1, target, source + i * step);
    return target;
  }

  void row(std::byte* target, const std::byte* source, std::int64_t count, std::int64_t step) const {
    if (step == static_cast<std::int64_t>(item_)) {
      std::memcpy(target, source, static_cast<std::size_t>(count) * item_);
      return;
    }
    switch (item_) {
      case 1:
        return copy_row<1>(target, source, count, step);
      case 2:
        return copy_row<2>(target, source, count, step);
      case 4:
        return copy_row<4>(target, source, count, step);
      default:
        return copy_row<8>(target, source, count, step);
    }
  }

  Layout layout_;
  std::size_t item_;
};

}  // namespace

std::int64_t element_count(const Shape& shape) {
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0)
      throw Error(ErrorKind::argument, "a tensor of shape " + to_string(shape) + " has a negative extent");
    if (extent == 0)
      empty = true;
    else if (__builtin_mul_overflow(count, extent, &count))
      too_large(shape);
  }
  return empty ? 0 : count;
}

std::size_t byte_size(DType dtype, const Shape& shape) {
  std::int64_t all_bits = 0;
  // 7 more bits must fit as well: packed elements are rounded up to a byte.
  if (__builtin_mul_overflow(element_count(shape), std::int64_t{bits(dtype)}, &all_bits) || all_bits > INT64_MAX - 7)
    too_large(shape);
  return static_cast<std::size_t>((all_bits + 7) / 8);
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

TensorView::TensorView(DType dtype, Shape shape, const void* data, Strides strides)
    : dtype_(dtype),
      shape_(std::move(shape)),
      strides_(std::move(strides)),
      data_(static_cast<const std::byte*>(data)),
      elements_(element_count(shape_)),
      nbytes_(byte_size(dtype, shape_)) {
  if (data_ == nullptr && nbytes_ != 0)
    throw Error(ErrorKind::argument, "a tensor of shape " + to_string(shape_) + " has no memory");
  if (strides_.empty()) return;
  if (strides_.size() != shape_.size())
    throw Error(ErrorKind::argument,
                "a tensor of shape " + to_string(shape_) + " has " + std::to_string(strides_.size()) + " strides");
  if (is_packed(dtype_))
    throw Error(ErrorKind::argument, "a packed tensor (" + std::string(to_string(dtype_)) +
                                         ") cannot be strided: its elements have no address");
  if (elements_ == 0 || is_row_major(shape_, strides_)) strides_.clear();
}

std::span<const std::byte> TensorView::bytes() const {
  if (!is_contiguous()) throw Error(ErrorKind::argument, "bytes of a strided tensor: copy it first (Tensor::copy_of)");
  return {data_, nbytes_};
}

TensorView TensorView::slice(std::size_t dim, std::int64_t begin, std::int64_t end) const {
  if (dim >= shape_.size() || begin < 0 || end < begin || end > shape_[dim])
    throw Error(ErrorKind::argument, "slice [" + std::to_string(begin) + ", " + std::to_string(end) +
                                         ") of dimension " + std::to_string(dim) + " is not inside a tensor of shape " +
                                         to_string(shape_));
  Shape shape = shape_;
  shape[dim] = end - begin;
  if (is_packed(dtype_)) {
    // Whole rows of the outermost dimension can be cut where they end at a byte.
    const std::int64_t row = shape_[dim] == 0 ? 0 : elements_ / shape_[dim];
    const bool outermost = std::all_of(shape_.begin(), shape_.begin() + static_cast<std::ptrdiff_t>(dim),
                                       [](std::int64_t e) { return e == 1; });
    if (!outermost || (begin * row) % 2 != 0 || ((end * row) % 2 != 0 && end != shape_[dim]))
      throw Error(ErrorKind::argument,
                  "a slice of a packed tensor (" + std::string(to_string(dtype_)) + ") cuts through a byte");
    return {dtype_, std::move(shape), data_ == nullptr ? nullptr : data_ + begin * row / 2};
  }
  Strides strides = strides_.empty() ? row_major(shape_) : strides_;
  const std::byte* data =
      data_ == nullptr ? nullptr : data_ + begin * strides[dim] * static_cast<std::int64_t>(itemsize(dtype_));
  return {dtype_, std::move(shape), data, std::move(strides)};
}

TensorView TensorView::transposed() const {
  if (is_packed(dtype_) && shape_.size() > 1)
    throw Error(ErrorKind::argument, "a packed tensor (" + std::string(to_string(dtype_)) + ") cannot be transposed");
  Shape shape(shape_.rbegin(), shape_.rend());
  Strides strides = strides_.empty() ? row_major(shape_) : strides_;
  std::ranges::reverse(strides);
  if (is_packed(dtype_)) strides.clear();
  return {dtype_, std::move(shape), data_, std::move(strides)};
}

void copy_contiguous(const TensorView& source, std::byte* target) {
  if (source.nbytes() == 0) return;
  if (source.is_contiguous())
    std::memcpy(target, source.data(), source.nbytes());
  else
    StridedCopy(source).run(target, source.data());
}

bool bitwise_equal(const TensorView& a, const TensorView& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  if (a.nbytes() == 0) return true;
  if (a.is_contiguous() && b.is_contiguous()) return std::memcmp(a.data(), b.data(), a.nbytes()) == 0;
  const auto contiguous = [](const TensorView& view) {
    return view.is_contiguous() ? Tensor::borrow(view) : Tensor::copy_of(view);
  };
  return std::memcmp(contiguous(a).data(), contiguous(b).data(), a.nbytes()) == 0;
}

Tensor::Tensor(TensorView view, std::shared_ptr<const void> owner) : view_(std::move(view)), owner_(std::move(owner)) {}

Tensor::Tensor(TensorView view, std::shared_ptr<const void> owner, std::byte* data)
    : view_(std::move(view)), owner_(std::move(owner)), mutable_(data) {}

Tensor Tensor::allocate(DType dtype, Shape shape) {
  const std::size_t bytes = byte_size(dtype, shape);
  void* memory = ::operator new (std::max<std::size_t>(bytes, 1), std::align_val_t{alignment}, std::nothrow);
  if (memory == nullptr)
    throw Error(ErrorKind::no_space,
                "no memory for a tensor of shape " + to_string(shape) + " (" + std::to_string(bytes) + " bytes)");
  std::shared_ptr<const void> owner(static_cast<const void*>(memory),
                                    [memory](const void*) { ::operator delete (memory, std::align_val_t{alignment}); });
  return {TensorView(dtype, std::move(shape), memory), std::move(owner), static_cast<std::byte*>(memory)};
}

Tensor Tensor::copy_of(const TensorView& source) {
  Tensor copy = allocate(source.dtype(), source.shape());
  copy_contiguous(source, copy.mutable_data());
  return copy;
}

Tensor Tensor::borrow(TensorView view) {
  return {std::move(view), nullptr};
}

std::byte* Tensor::mutable_data() const {
  if (mutable_ == nullptr)
    throw Error(ErrorKind::argument, "this tensor is read-only (gathered, mapped or borrowed): copy it to write it");
  return mutable_;
}

}  // namespace muster

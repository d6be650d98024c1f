// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors: TensorView looks at somebody's elements, Tensor also knows who keeps them alive.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/device.hpp"
#include "muster/dtype.hpp"

namespace muster {

/// Extents, outermost first; empty for a scalar. None is negative.
using Shape = std::vector<std::int64_t>;
/// Steps in elements, one an extent; may be zero or negative. Empty means row-major without gaps.
using Strides = std::vector<std::int64_t>;

/// The number of elements. Throws Error(argument) on a negative extent or if it does not fit 63 bits.
std::int64_t element_count(const Shape& shape);

/// Bytes of a contiguous tensor (packed types: rounded up to a byte). Throws like element_count.
std::size_t byte_size(DType dtype, const Shape& shape);

/// "[4, 8]"; "[]" for a scalar.
std::string to_string(const Shape& shape);

namespace detail {
/// Throws Error(argument): a shape does not have that number of elements.
[[noreturn]] void refuse_count(std::size_t elements, const Shape& shape);
/// Throws Error(argument) if elements of the dtype are not so large.
void check_element_size(DType dtype, std::size_t size);
}  // namespace detail

/// What a tensor is, without its elements.
struct TensorSpec {
  DType dtype = DType::u8;
  Shape shape = {};
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
/// "BF16 [4, 8]".
std::string to_string(const TensorSpec& spec);

/// Looks at elements that someone else keeps: as long-lived as their memory. What is on a device has the same shapes
/// and strides, and its bytes are not the CPU's to read: whatever would read them throws Error(argument) instead.
class TensorView {
 public:
  TensorView() = default;
  /// `data` is the first element (it may be null if there are no elements), on `device`. Throws Error(argument) on
  /// shapes that overflow, on strides whose number is not the shape's, on strides with a packed dtype, and on a
  /// negative index of a device.
  TensorView(DType dtype, Shape shape, const void* data, Strides strides = {}, Device device = {});

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  /// Empty for a contiguous view (strides that mean the same are dropped).
  [[nodiscard]] const Strides& strides() const noexcept { return strides_; }
  /// An address on device().
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  /// The same, for the CPU to read. Throws Error(argument) if the elements are on a device.
  [[nodiscard]] const std::byte* host_data() const {
    if (!device_.is_host()) refuse_to_read();
    return data_;
  }
  /// The first element as a T, whose dtype must be this one (dtype_of), for the CPU to read; the others follow by
  /// strides(). Throws Error(argument) on another dtype, if the elements are on a device, and if the address is
  /// not one for a T (tensors of mapped files may begin at any byte: copy those).
  template <class T>
  [[nodiscard]] const T* data() const {
    check_elements(dtype_of<T>, sizeof(T), alignof(T));
    return reinterpret_cast<const T*>(data_);
  }
  /// All elements of a contiguous view. Throws as data(), and Error(argument) on a strided one.
  template <class T>
  [[nodiscard]] std::span<const T> values() const {
    check_elements(dtype_of<T>, sizeof(T), alignof(T));
    return {reinterpret_cast<const T*>(bytes().data()), static_cast<std::size_t>(elements_)};
  }
  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] bool is_contiguous() const noexcept { return strides_.empty(); }
  [[nodiscard]] std::int64_t elements() const noexcept { return elements_; }
  /// Bytes that a contiguous copy takes.
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  /// The bytes of a contiguous view. Throws Error(argument) on a strided one and on one of a device.
  [[nodiscard]] std::span<const std::byte> bytes() const;

  /// Elements [begin, end) of one dimension. Throws Error(argument) if that is not inside, or cuts through a packed
  /// byte.
  [[nodiscard]] TensorView slice(std::size_t dim, std::int64_t begin, std::int64_t end) const;
  /// The dimensions in reverse order (a view; nothing is copied).
  [[nodiscard]] TensorView transposed() const;

 private:
  [[noreturn]] void refuse_to_read() const;
  void check_elements(DType wanted, std::size_t size, std::size_t alignment) const;

  DType dtype_ = DType::u8;
  Device device_;
  Shape shape_ = {0};
  Strides strides_;
  const std::byte* data_ = nullptr;
  std::int64_t elements_ = 0;
  std::size_t nbytes_ = 0;
};

/// Looks at the elements of a vector or a span, of the dtype of its type (dtype_of): one dimension, or the shape that
/// is given; valid as long as they are. Throws Error(argument) if that has another number of elements, or if a T has
/// not the size of its dtype's elements.
template <class T, std::size_t N>
TensorView view_of(std::span<T, N> elements, Shape shape) {
  if (element_count(shape) != static_cast<std::int64_t>(elements.size())) detail::refuse_count(elements.size(), shape);
  detail::check_element_size(dtype_of<std::remove_cv_t<T>>, sizeof(T));
  return {dtype_of<std::remove_cv_t<T>>, std::move(shape), elements.data()};
}
template <class T, std::size_t N>
TensorView view_of(std::span<T, N> elements) {
  return view_of(elements, {static_cast<std::int64_t>(elements.size())});
}
template <class T>
TensorView view_of(const std::vector<T>& elements, Shape shape) {
  return view_of(std::span<const T>(elements), std::move(shape));
}
template <class T>
TensorView view_of(const std::vector<T>& elements) {
  return view_of(std::span<const T>(elements));
}
// A vector that ends with the expression leaves nothing to look at: Tensor::take keeps it.
template <class T>
TensorView view_of(const std::vector<T>&& elements, Shape shape) = delete;
template <class T>
TensorView view_of(const std::vector<T>&& elements) = delete;

/// Writes the elements of `source`, row-major and without gaps, to `target`, which has room for source.nbytes(). Throws
/// Error(argument) if they are on a device.
void copy_contiguous(const TensorView& source, std::byte* target);

/// Same dtype, shape and bits (NaN payloads and the sign of zero count). Strides do not matter. Throws Error(argument)
/// where elements that must be read are on a device.
bool bitwise_equal(const TensorView& a, const TensorView& b);

/// A view and the owner of its memory: heap, shared memory, a mapped file, a device, or nobody (borrowed). Copies share
/// the memory.
class Tensor {
 public:
  Tensor() = default;
  /// A view of memory that `owner` keeps; a null owner borrows. Read-only.
  Tensor(TensorView view, std::shared_ptr<const void> owner);
  /// Likewise, and mutable_data() may be used. `data` is the view's own memory.
  Tensor(TensorView view, std::shared_ptr<const void> owner, std::byte* data);

  /// Fresh heap memory, 64-byte aligned, not initialised. Throws Error(no_space) if there is none.
  static Tensor allocate(DType dtype, Shape shape);
  /// A contiguous copy on the heap. Throws Error(argument) if the source is on a device.
  static Tensor copy_of(const TensorView& source);
  /// Keeps the vector, whose elements it has: one dimension, or the shape that is given, as for view_of. Writable.
  template <class T>
  static Tensor take(std::vector<T> elements, Shape shape) {
    if (elements.empty()) return allocate(dtype_of<T>, view_of(std::as_const(elements), std::move(shape)).shape());
    const auto owner = std::make_shared<std::vector<T>>(std::move(elements));
    return {view_of(std::as_const(*owner), std::move(shape)), owner, reinterpret_cast<std::byte*>(owner->data())};
  }
  template <class T>
  static Tensor take(std::vector<T> elements) {
    const auto count = static_cast<std::int64_t>(elements.size());
    return take(std::move(elements), {count});
  }
  /// Keeps nothing alive: the caller does, as long as the tensor and its copies are used.
  static Tensor borrow(TensorView view);

  [[nodiscard]] const TensorView& view() const noexcept { return view_; }
  operator const TensorView&() const noexcept {
    return view_;
  }  // NOLINT(google-explicit-constructor): a tensor is a view with an owner
  [[nodiscard]] DType dtype() const noexcept { return view_.dtype(); }
  [[nodiscard]] const Shape& shape() const noexcept { return view_.shape(); }
  [[nodiscard]] const Device& device() const noexcept { return view_.device(); }
  [[nodiscard]] const std::byte* data() const noexcept { return view_.data(); }
  [[nodiscard]] std::size_t nbytes() const noexcept { return view_.nbytes(); }
  [[nodiscard]] std::span<const std::byte> bytes() const { return view_.bytes(); }
  /// As those of the view.
  template <class T>
  [[nodiscard]] const T* data() const {
    return view_.data<T>();
  }
  template <class T>
  [[nodiscard]] std::span<const T> values() const {
    return view_.values<T>();
  }
  [[nodiscard]] bool is_writable() const noexcept { return mutable_ != nullptr; }
  /// Throws Error(argument) if the memory is not the holder's to write (gathered, mapped or borrowed tensors).
  [[nodiscard]] std::byte* mutable_data() const;
  /// The elements, to be written. Throws as these and as TensorView::values().
  template <class T>
  [[nodiscard]] std::span<T> mutable_values() const {
    const std::span<const T> all = view_.values<T>();
    return {reinterpret_cast<T*>(mutable_data()), all.size()};
  }
  /// Who keeps the memory; null for a borrowed tensor.
  [[nodiscard]] const std::shared_ptr<const void>& owner() const noexcept { return owner_; }

 private:
  TensorView view_;
  std::shared_ptr<const void> owner_;
  std::byte* mutable_ = nullptr;
};

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors. A TensorView refers to elements that another object owns. A Tensor also keeps the owner of the elements
// alive.

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

/// Extents, outermost first; empty for a scalar. Extents are not negative.
using Shape = std::vector<std::int64_t>;
/// Steps in elements, one per extent. They may be zero or negative. Empty means row-major without gaps.
using Strides = std::vector<std::int64_t>;

/// Returns the number of elements. Throws Error(invalid_argument) if an extent is negative or the number does not fit
/// in 63 bits.
std::int64_t element_count(const Shape& shape);

/// Returns the size of a contiguous tensor in bytes. For packed types it is rounded up to whole bytes. Throws as
/// element_count().
std::size_t byte_size(DType dtype, const Shape& shape);

/// Returns the shape as text: "[4, 8]", or "[]" for a scalar.
std::string to_string(const Shape& shape);

namespace detail {
/// Throws Error(invalid_argument), because `shape` does not have that number of elements.
[[noreturn]] void refuse_count(std::size_t elements, const Shape& shape);
/// Throws Error(invalid_argument) if the elements of `dtype` do not have `size` bytes.
void check_element_size(DType dtype, std::size_t size);
}  // namespace detail

/// The dtype and the shape of a tensor.
struct TensorSpec {
  /// The type of the elements.
  DType dtype = DType::u8;
  /// The extents.
  Shape shape = {};
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
/// Returns the spec as text: "BF16 [4, 8]".
std::string to_string(const TensorSpec& spec);

/// Refers to elements in memory that another object owns; valid as long as that memory. A view of elements on a GPU has
/// the same shapes and strides, but the CPU cannot read its bytes. Every function that would read them throws
/// Error(invalid_argument).
class TensorView {
 public:
  TensorView() = default;
  /// `data` is the address of the first element on `device`. It may be null if there are no elements. Throws
  /// Error(invalid_argument) if the shape overflows, if the number of strides differs from the number of extents, if a
  /// packed dtype has strides, or if the index of the device is negative.
  TensorView(DType dtype, Shape shape, const void* data, Strides strides = {}, Device device = {});

  /// Returns the type of the elements.
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  /// Returns the extents.
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  /// Returns the strides; empty for a contiguous view. The constructor drops strides that describe a contiguous view.
  [[nodiscard]] const Strides& strides() const noexcept { return strides_; }
  /// Returns the address of the first element, which is an address on device().
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  /// Returns the same address, for reading by the CPU. Throws Error(invalid_argument) if the elements are on a GPU.
  [[nodiscard]] const std::byte* host_data() const {
    if (!device_.is_host()) refuse_to_read();
    return data_;
  }
  /// Returns the address of the first element as a T, for reading by the CPU; strides() locates the others. Throws
  /// Error(invalid_argument) if dtype_of<T> is not dtype(), if the elements are on a GPU, or if the address is not
  /// aligned for T. Tensors of mapped files may begin at any byte; copy those.
  template <class T>
  [[nodiscard]] const T* data() const {
    check_elements(dtype_of<T>, sizeof(T), alignof(T));
    return reinterpret_cast<const T*>(data_);
  }
  /// Returns all elements of a contiguous view. Throws as data(), and Error(invalid_argument) if the view is strided.
  template <class T>
  [[nodiscard]] std::span<const T> values() const {
    check_elements(dtype_of<T>, sizeof(T), alignof(T));
    return {reinterpret_cast<const T*>(bytes().data()), static_cast<std::size_t>(elements_)};
  }
  /// Returns the location of the elements.
  [[nodiscard]] const Device& device() const noexcept { return device_; }
  /// Returns whether the elements are in row-major order without gaps.
  [[nodiscard]] bool is_contiguous() const noexcept { return strides_.empty(); }
  /// Returns the number of elements.
  [[nodiscard]] std::int64_t element_count() const noexcept { return elements_; }
  /// Returns the size of a contiguous copy in bytes.
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  /// Returns the bytes of a contiguous view. Throws Error(invalid_argument) if the view is strided or its elements are
  /// on a GPU.
  [[nodiscard]] std::span<const std::byte> bytes() const;

  /// Returns a view of the elements [begin, end) of dimension `dim`. Throws Error(invalid_argument) if the range is
  /// outside the extent or cuts through a byte of a packed type.
  [[nodiscard]] TensorView slice(std::size_t dim, std::int64_t begin, std::int64_t end) const;
  /// Returns a view with the dimensions in reverse order. Nothing is copied.
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

/// Returns a view of the elements of a vector or a span, valid as long as they are. The dtype is dtype_of<T>. The shape
/// is one-dimensional unless `shape` is given. Throws Error(invalid_argument) if `shape` has another number of
/// elements, or if the size of T differs from the element size of its dtype.
template <class T, std::size_t N>
TensorView view_of(std::span<T, N> elements, Shape shape) {
  if (element_count(shape) != static_cast<std::int64_t>(elements.size())) detail::refuse_count(elements.size(), shape);
  detail::check_element_size(dtype_of<std::remove_cv_t<T>>, sizeof(T));
  return {dtype_of<std::remove_cv_t<T>>, std::move(shape), elements.data()};
}
/// Returns a one-dimensional view of a span.
template <class T, std::size_t N>
TensorView view_of(std::span<T, N> elements) {
  return view_of(elements, {static_cast<std::int64_t>(elements.size())});
}
/// Returns a view of a vector with the given shape.
template <class T>
TensorView view_of(const std::vector<T>& elements, Shape shape) {
  return view_of(std::span<const T>(elements), std::move(shape));
}
/// Returns a one-dimensional view of a vector.
template <class T>
TensorView view_of(const std::vector<T>& elements) {
  return view_of(std::span<const T>(elements));
}
// A view of a temporary vector would dangle. Use Tensor::take, which keeps the vector.
template <class T>
TensorView view_of(const std::vector<T>&& elements, Shape shape) = delete;
template <class T>
TensorView view_of(const std::vector<T>&& elements) = delete;

/// Writes the elements of `source` to `target`, row-major and without gaps. `target` has space for source.nbytes()
/// bytes. Throws Error(invalid_argument) if the elements are on a GPU.
void copy_contiguous(const TensorView& source, std::byte* target);

/// Returns whether both have the same dtype, shape and bits. NaN payloads and the sign of zero count; strides do not.
/// Throws Error(invalid_argument) if the elements have to be compared and are on a GPU.
bool bitwise_equal(const TensorView& a, const TensorView& b);

/// A view together with the owner of its memory: heap, shared memory, a mapped file or a GPU. A borrowed tensor has no
/// owner. Copies share the memory.
class Tensor {
 public:
  Tensor() = default;
  /// Creates a read-only tensor whose memory `owner` keeps alive. A null owner borrows the memory.
  Tensor(TensorView view, std::shared_ptr<const void> owner);
  /// Creates a writable tensor, so that mutable_data() may be used. `data` is the address of view.data().
  Tensor(TensorView view, std::shared_ptr<const void> owner, std::byte* data);

  /// Allocates uninitialized heap memory, aligned to 64 bytes. Throws Error(out_of_space) if not enough memory is
  /// available.
  static Tensor allocate(DType dtype, Shape shape);
  /// Returns a contiguous copy on the heap. Throws Error(invalid_argument) if the source is on a GPU.
  static Tensor copy_of(const TensorView& source);
  /// Returns a writable tensor that owns `elements`. The shape is one-dimensional unless `shape` is given. Throws as
  /// view_of().
  template <class T>
  static Tensor take(std::vector<T> elements, Shape shape) {
    if (elements.empty()) return allocate(dtype_of<T>, view_of(std::as_const(elements), std::move(shape)).shape());
    const auto owner = std::make_shared<std::vector<T>>(std::move(elements));
    return {view_of(std::as_const(*owner), std::move(shape)), owner, reinterpret_cast<std::byte*>(owner->data())};
  }
  /// Returns a writable one-dimensional tensor that owns `elements`.
  template <class T>
  static Tensor take(std::vector<T> elements) {
    const auto count = static_cast<std::int64_t>(elements.size());
    return take(std::move(elements), {count});
  }
  /// Returns a tensor without an owner. The caller keeps the memory alive as long as the tensor and its copies are in
  /// use.
  static Tensor borrow(TensorView view);

  /// Returns the view.
  [[nodiscard]] const TensorView& view() const noexcept { return view_; }
  /// Converts to the view, so that a tensor can be passed where a view is expected.
  operator const TensorView&() const noexcept {
    return view_;
  }  // NOLINT(google-explicit-constructor): a tensor is a view with an owner
  /// Returns the type of the elements.
  [[nodiscard]] DType dtype() const noexcept { return view_.dtype(); }
  /// Returns the extents.
  [[nodiscard]] const Shape& shape() const noexcept { return view_.shape(); }
  /// Returns the location of the elements.
  [[nodiscard]] const Device& device() const noexcept { return view_.device(); }
  /// Returns the address of the first element, as TensorView::data().
  [[nodiscard]] const std::byte* data() const noexcept { return view_.data(); }
  /// Returns the size of a contiguous copy in bytes.
  [[nodiscard]] std::size_t nbytes() const noexcept { return view_.nbytes(); }
  /// Returns the bytes, as TensorView::bytes().
  [[nodiscard]] std::span<const std::byte> bytes() const { return view_.bytes(); }
  /// As the functions of TensorView.
  template <class T>
  [[nodiscard]] const T* data() const {
    return view_.data<T>();
  }
  /// Returns all elements of a contiguous tensor, as TensorView::values().
  template <class T>
  [[nodiscard]] std::span<const T> values() const {
    return view_.values<T>();
  }
  /// Returns whether mutable_data() may be used.
  [[nodiscard]] bool is_writable() const noexcept { return mutable_ != nullptr; }
  /// Returns the address of the first element, for writing. Throws Error(invalid_argument) if the tensor is read-only
  /// (gathered, mapped or borrowed tensors).
  [[nodiscard]] std::byte* mutable_data() const;
  /// Returns all elements of a contiguous tensor, for writing. Throws as mutable_data() and TensorView::values().
  template <class T>
  [[nodiscard]] std::span<T> mutable_values() const {
    const std::span<const T> all = view_.values<T>();
    return {reinterpret_cast<T*>(mutable_data()), all.size()};
  }
  /// Returns the owner of the memory; null for a borrowed tensor.
  [[nodiscard]] const std::shared_ptr<const void>& owner() const noexcept { return owner_; }

 private:
  TensorView view_;
  std::shared_ptr<const void> owner_;
  std::byte* mutable_ = nullptr;
};

/// A tensor of this rank, or a part of one: a box of its elements. A rank may pass several parts of one tensor.
struct TensorPart {
  std::string name;   ///< the name in the checkpoint; with a plan, the name on this rank
  Tensor tensor;      ///< may be strided
  Shape whole = {};   ///< shape of the whole tensor; if empty, this part is the whole tensor
  Shape offset = {};  ///< position of the first element of the part in the whole tensor; if empty, zero
};

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0

#include "muster/tensor.hpp"
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include "muster/dtype.hpp"
#include "muster/error.hpp"
#include "src/base/message.hpp"
#include "src/core/tensor.hpp"

namespace muster {
namespace {

constexpr std::size_t alignment = 64;

std::string shaped(const Shape& shape) {
  return "tensor of shape " + to_string(shape);
}

std::string packed(DType dtype) {
  return "packed tensor (" + std::string(to_string(dtype)) + ")";
}

[[noreturn]] void too_large(const Shape& shape) {
  throw Error(ErrorKind::invalid_argument, shaped(shape) + ": more bytes than 63 bits can count");
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

/// Dimensions with one element are ignored, because their strides have no effect.
bool is_row_major(const Shape& shape, const Strides& strides) {
  std::int64_t step = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    if (shape[dim] != 1 && strides[dim] != step) return false;
    step *= shape[dim];
  }
  return true;
}

/// One dimension of a copy, in bytes.
struct Dimension {
  std::int64_t extent;
  std::int64_t source_step;
  std::int64_t target_step;
};

/// Returns a strided view with as few dimensions as possible, outermost first; at least one.
std::vector<Dimension> merged_dimensions(const TensorView& view) {
  const auto item = static_cast<std::int64_t>(itemsize(view.dtype()));
  std::vector<Dimension> merged;
  for (std::size_t dim = 0; dim < view.shape().size(); ++dim) {
    const std::int64_t extent = view.shape()[dim];
    const std::int64_t step = view.strides()[dim] * item;
    if (extent == 1) continue;
    if (!merged.empty() && merged.back().source_step == step * extent) {
      merged.back().extent *= extent;
      merged.back().source_step = step;
    } else {
      merged.push_back({extent, step, 0});
    }
  }
  if (merged.empty()) merged.push_back({1, item, 0});
  std::int64_t target_step = item;
  for (std::size_t dim = merged.size(); dim-- > 0;) {
    merged[dim].target_step = target_step;
    target_step *= merged[dim].extent;
  }
  return merged;
}

/// Copies elements of one size. The target is written row by row. If adjacent elements of the source are along another
/// dimension (a transpose), the two dimensions are copied in square tiles. Each cache line is then used once on either
/// side.
template <std::size_t Item>
class StridedCopy {
 public:
  explicit StridedCopy(std::vector<Dimension> dims) : dims_(std::move(dims)) {
    const auto nearest = std::ranges::min_element(
        dims_, {}, [](const Dimension& d) { return d.source_step == 0 ? INT64_MAX : std::abs(d.source_step); });
    is_tiled_ = nearest + 1 != dims_.end() && dims_.back().source_step != 0 && nearest->extent >= tile / 4;
    if (is_tiled_) std::rotate(nearest, nearest + 1, dims_.end() - 1);
  }

  void run(std::byte* target, const std::byte* source) const { outer(0, target, source); }

 private:
  static constexpr std::int64_t tile = 64 / Item;
  static constexpr auto item = static_cast<std::int64_t>(Item);

  void outer(std::size_t dim, std::byte* target, const std::byte* source) const {
    const std::size_t left = dims_.size() - dim;
    if (left == 1) return row(target, source, dims_[dim].extent, dims_[dim].source_step);
    if (left == 2 && is_tiled_) return tiles(dims_[dim], dims_[dim + 1], target, source);
    const Dimension& along = dims_[dim];
    for (std::int64_t i = 0; i < along.extent; ++i)
      outer(dim + 1, target + i * along.target_step, source + i * along.source_step);
  }

  static void row(std::byte* target, const std::byte* source, std::int64_t count, std::int64_t step) {
    if (step == item) {
      std::memcpy(target, source, static_cast<std::size_t>(count) * Item);
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(target + i * item, source + i * step, Item);
  }

  /// `near`: the dimension along which the source is contiguous; `inner`: that of the target.
  static void tiles(const Dimension& near, const Dimension& inner, std::byte* target, const std::byte* source) {
    for (std::int64_t i = 0; i < near.extent; i += tile)
      for (std::int64_t j = 0; j < inner.extent; j += tile)
        one_tile({std::min(tile, near.extent - i), near.source_step, near.target_step},
                 {std::min(tile, inner.extent - j), inner.source_step, item}, target + i * near.target_step + j * item,
                 source + i * near.source_step + j * inner.source_step);
  }

  static void one_tile(const Dimension& near, const Dimension& inner, std::byte* target, const std::byte* source) {
    std::byte lines[tile * tile * item];
    for (std::int64_t j = 0; j < inner.extent; ++j)
      row(lines + j * tile * item, source + j * inner.source_step, near.extent, near.source_step);
    for (std::int64_t i = 0; i < near.extent; ++i)
      row(target + i * near.target_step, lines + i * item, inner.extent, tile * item);
  }

  std::vector<Dimension> dims_;
  bool is_tiled_;
};

}  // namespace

std::string to_string(const Device& device) {
  return device.is_host() ? "host" : "cuda:" + std::to_string(device.index);
}

std::int64_t element_count(const Shape& shape) {
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) throw Error(ErrorKind::invalid_argument, shaped(shape) + ": a dimension must not be negative");
    if (extent == 0)
      empty = true;
    else if (__builtin_mul_overflow(count, extent, &count))
      too_large(shape);
  }
  return empty ? 0 : count;
}

std::size_t byte_size(DType dtype, const Shape& shape) {
  std::int64_t all_bits = 0;
  // 7 more bits must fit as well, because packed elements are rounded up to a byte.
  if (__builtin_mul_overflow(element_count(shape), std::int64_t{bits(dtype)}, &all_bits) || all_bits > INT64_MAX - 7)
    too_large(shape);
  return static_cast<std::size_t>((all_bits + 7) / 8);
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

std::string to_string(const TensorSpec& spec) {
  return std::string(to_string(spec.dtype)) + " " + to_string(spec.shape);
}

TensorView::TensorView(DType dtype, Shape shape, const void* data, Strides strides, Device device)
    : dtype_(dtype),
      device_(device),
      shape_(std::move(shape)),
      strides_(std::move(strides)),
      data_(static_cast<const std::byte*>(data)),
      elements_(muster::element_count(shape_)),
      nbytes_(byte_size(dtype, shape_)) {
  if (data_ == nullptr && nbytes_ != 0)
    throw Error(ErrorKind::invalid_argument, shaped(shape_) + ": the address must not be null");
  if (device_.index < 0)
    throw Error(ErrorKind::invalid_argument,
                shaped(shape_) + ": the device index " + std::to_string(device_.index) + " must not be negative");
  if (strides_.empty()) return;
  if (strides_.size() != shape_.size())
    throw Error(ErrorKind::invalid_argument, shaped(shape_) + ": expected " + std::to_string(shape_.size()) +
                                                 " strides, received " + std::to_string(strides_.size()));
  if (is_packed(dtype_))
    throw Error(ErrorKind::invalid_argument, packed(dtype_) + ": it cannot have strides: its elements have no address");
  if (elements_ == 0 || is_row_major(shape_, strides_)) strides_.clear();
}

std::span<const std::byte> TensorView::bytes() const {
  if (!is_contiguous())
    throw Error(ErrorKind::invalid_argument,
                "tensor: reading its bytes: it is strided. Copy it first (Tensor::copy_of)");
  return {host_data(), nbytes_};
}

void TensorView::refuse_to_read() const {
  throw Error(ErrorKind::invalid_argument,
              shaped(shape_) + ": reading it on the host: it is on " + to_string(device_) +
                  ". Copy it to the host first, or gather it with the device route (muster/cuda.hpp, libmuster-cuda)");
}

void detail::check_element_size(DType dtype, std::size_t size) {
  if (8 * size != static_cast<std::size_t>(bits(dtype)))
    throw Error(ErrorKind::invalid_argument, "tensor: a C++ type of " + std::to_string(size) +
                                                 " bytes does not fit dtype " + std::string(to_string(dtype)) +
                                                 ", whose elements have " + std::to_string(bits(dtype)) +
                                                 " bits (DTypeOf)");
}

void TensorView::check_elements(DType wanted, std::size_t size, std::size_t alignment) const {
  detail::check_element_size(wanted, size);
  if (wanted != dtype_)
    throw Error(ErrorKind::invalid_argument, "tensor: its dtype is " + std::string(to_string(dtype_)) + ", but " +
                                                 std::string(to_string(wanted)) + " was requested");
  if (reinterpret_cast<std::uintptr_t>(host_data()) % alignment != 0)
    throw Error(ErrorKind::invalid_argument,
                shaped(shape_) + ": its address is not aligned for its element type. Copy it first (Tensor::copy_of)");
}

void detail::refuse_count(std::size_t elements, const Shape& shape) {
  throw Error(ErrorKind::invalid_argument, shaped(shape) + ": received " + std::to_string(elements) + " elements");
}

TensorView TensorView::slice(std::size_t dim, std::int64_t begin, std::int64_t end) const {
  if (dim >= shape_.size() || begin < 0 || end < begin || end > shape_[dim])
    throw Error(ErrorKind::invalid_argument, shaped(shape_) + ": slice [" + std::to_string(begin) + ", " +
                                                 std::to_string(end) + ") of dimension " + std::to_string(dim) +
                                                 " is out of range");
  Shape shape = shape_;
  shape[dim] = end - begin;
  if (is_packed(dtype_)) {
    // Whole rows of the outermost dimension can be cut if they end at a byte boundary.
    const std::int64_t row = shape_[dim] == 0 ? 0 : elements_ / shape_[dim];
    const bool outermost = std::all_of(shape_.begin(), shape_.begin() + static_cast<std::ptrdiff_t>(dim),
                                       [](std::int64_t e) { return e == 1; });
    const std::int64_t group = elements_in_group(dtype_);
    if (!outermost || (begin * row) % group != 0 || ((end * row) % group != 0 && end != shape_[dim]))
      throw Error(ErrorKind::invalid_argument, packed(dtype_) + ": the slice begins or ends within a byte");
    return {dtype_, std::move(shape), data_ == nullptr ? nullptr : data_ + begin * row * bits(dtype_) / 8, {}, device_};
  }
  Strides strides = strides_.empty() ? row_major(shape_) : strides_;
  const std::byte* data =
      data_ == nullptr ? nullptr : data_ + begin * strides[dim] * static_cast<std::int64_t>(itemsize(dtype_));
  return {dtype_, std::move(shape), data, std::move(strides), device_};
}

TensorView TensorView::transposed() const {
  if (is_packed(dtype_) && shape_.size() > 1)
    throw Error(ErrorKind::invalid_argument, packed(dtype_) + ": it cannot be transposed");
  Shape shape(shape_.rbegin(), shape_.rend());
  Strides strides = strides_.empty() ? row_major(shape_) : strides_;
  std::ranges::reverse(strides);
  if (is_packed(dtype_)) strides.clear();
  return {dtype_, std::move(shape), data_, std::move(strides), device_};
}

void copy_contiguous(const TensorView& source, std::byte* target) {
  if (source.nbytes() == 0) return;
  const std::byte* from = source.host_data();
  if (source.is_contiguous()) {
    std::memcpy(target, from, source.nbytes());
    return;
  }
  std::vector<Dimension> dims = merged_dimensions(source);
  switch (itemsize(source.dtype())) {
    case 1:
      return StridedCopy<1>(std::move(dims)).run(target, from);
    case 2:
      return StridedCopy<2>(std::move(dims)).run(target, from);
    case 4:
      return StridedCopy<4>(std::move(dims)).run(target, from);
    default:
      return StridedCopy<8>(std::move(dims)).run(target, from);
  }
}

bool bitwise_equal(const TensorView& a, const TensorView& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  if (a.nbytes() == 0) return true;
  if (a.is_contiguous() && b.is_contiguous()) return std::memcmp(a.host_data(), b.host_data(), a.nbytes()) == 0;
  const auto contiguous = [](const TensorView& view) {
    return view.is_contiguous() ? Tensor::borrow(view) : Tensor::copy_of(view);
  };
  return std::memcmp(contiguous(a).view().host_data(), contiguous(b).view().host_data(), a.nbytes()) == 0;
}

Tensor::Tensor(TensorView view, std::shared_ptr<const void> owner) : view_(std::move(view)), owner_(std::move(owner)) {}

Tensor::Tensor(TensorView view, std::shared_ptr<const void> owner, std::byte* data)
    : view_(std::move(view)), owner_(std::move(owner)), mutable_(data) {}

Tensor Tensor::allocate(DType dtype, Shape shape) {
  const std::size_t bytes = byte_size(dtype, shape);
  void* memory = ::operator new (std::max<std::size_t>(bytes, 1), std::align_val_t{alignment}, std::nothrow);
  if (memory == nullptr)
    throw Error(ErrorKind::out_of_space, shaped(shape) + ": allocating " + byte_text(bytes) + ": out of memory");
  std::shared_ptr<const void> owner(static_cast<const void*>(memory),
                                    [memory](const void*) { ::operator delete (memory, std::align_val_t{alignment}); });
  return {TensorView(dtype, std::move(shape), memory), std::move(owner), static_cast<std::byte*>(memory)};
}

Tensor Tensor::copy_of(const TensorView& source) {
  if (source.nbytes() != 0) (void)source.host_data();  // fails before memory is allocated
  Tensor copy = allocate(source.dtype(), source.shape());
  copy_contiguous(source, copy.mutable_data());
  return copy;
}

Tensor Tensor::borrow(TensorView view) {
  return {std::move(view), nullptr};
}

std::byte* Tensor::mutable_data() const {
  if (mutable_ == nullptr)
    throw Error(
        ErrorKind::invalid_argument,
        "tensor: writing to it: it is read-only (gathered, mapped or borrowed). Copy it first (Tensor::copy_of)");
  return mutable_;
}

}  // namespace muster

namespace muster::core {

void copy_elements(const TensorView& source, std::int64_t begin, std::int64_t end, std::byte* target) {
  if (begin >= end) return;
  if (source.is_contiguous()) {
    const auto bits = static_cast<std::uint64_t>(muster::bits(source.dtype()));
    const std::uint64_t first = static_cast<std::uint64_t>(begin) * bits / 8;
    const std::uint64_t last =
        std::min<std::uint64_t>((static_cast<std::uint64_t>(end) * bits + 7) / 8, source.nbytes());
    std::memcpy(target, source.host_data() + first, last - first);
    return;
  }
  if (begin == 0 && end == source.element_count()) return copy_contiguous(source, target);
  // The outermost dimension with more than one index: a part of the first index, then whole indices, then a part of the
  // last one.
  std::size_t dim = 0;
  while (source.shape()[dim] == 1) ++dim;
  const std::int64_t inner = source.element_count() / source.shape()[dim];
  const auto item = static_cast<std::int64_t>(itemsize(source.dtype()));
  const auto part = [&](std::int64_t first, std::int64_t last, std::int64_t from, std::int64_t to) {
    copy_elements(source.slice(dim, first, last), from, to, target);
    target += (to - from) * item;
  };
  const std::int64_t first = begin / inner;
  const std::int64_t last = end / inner;
  const std::int64_t into_first = begin % inner;
  const std::int64_t into_last = end % inner;
  if (first == last) return part(first, first + 1, into_first, into_last);
  if (into_first != 0) part(first, first + 1, into_first, inner);
  const std::int64_t whole = into_first == 0 ? first : first + 1;
  if (whole < last) part(whole, last, 0, (last - whole) * inner);
  if (into_last != 0) part(last, last + 1, 0, into_last);
}

}  // namespace muster::core

namespace muster {
namespace {

struct CacheEntry {
  DType dtype;
  std::uint8_t bits;
  std::string_view name;
};

// In the order of the wire numbers: the position is the number.
constexpr std::array table = {
    CacheEntry{DType::boolean, 8, "BOOL"},
    CacheEntry{DType::u8, 8, "U8"},
    CacheEntry{DType::i8, 8, "I8"},
    CacheEntry{DType::u16, 16, "U16"},
    CacheEntry{DType::i16, 16, "I16"},
    CacheEntry{DType::u32, 32, "U32"},
    CacheEntry{DType::i32, 32, "I32"},
    CacheEntry{DType::u64, 64, "U64"},
    CacheEntry{DType::i64, 64, "I64"},
    CacheEntry{DType::f16, 16, "F16"},
    CacheEntry{DType::bf16, 16, "BF16"},
    CacheEntry{DType::f32, 32, "F32"},
    CacheEntry{DType::f64, 64, "F64"},
    CacheEntry{DType::f8_e4m3fn, 8, "F8_E4M3"},
    CacheEntry{DType::f8_e5m2, 8, "F8_E5M2"},
    CacheEntry{DType::f8_e8m0, 8, "F8_E8M0"},
    CacheEntry{DType::f4_e2m1, 4, "F4"},
    CacheEntry{DType::u4, 4, "U4"},
    CacheEntry{DType::i4, 4, "I4"},
    CacheEntry{DType::complex64, 64, "C64"},
    CacheEntry{DType::f8_e4m3fnuz, 8, "F8_E4M3FNUZ"},
    CacheEntry{DType::f8_e5m2fnuz, 8, "F8_E5M2FNUZ"},
    CacheEntry{DType::f6_e2m3, 6, "F6_E2M3"},
    CacheEntry{DType::f6_e3m2, 6, "F6_E3M2"},
};

constexpr bool is_in_order() {
  for (std::size_t i = 0; i < table.size(); ++i)
    if (static_cast<std::size_t>(table[i].dtype) != i) return false;
  return true;
}
static_assert(is_in_order());

const CacheEntry& entry(DType dtype) noexcept {
  return table[static_cast<std::size_t>(dtype)];
}

constexpr auto dtypes = [] {
  std::array<DType, table.size()> all{};
  for (std::size_t i = 0; i < table.size(); ++i) all[i] = table[i].dtype;
  return all;
}();

}  // namespace

std::span<const DType> all_dtypes() noexcept {
  return dtypes;
}
int bits(DType dtype) noexcept {
  return entry(dtype).bits;
}
std::size_t itemsize(DType dtype) noexcept {
  return entry(dtype).bits / 8U;
}
bool is_packed(DType dtype) noexcept {
  return entry(dtype).bits < 8;
}
int elements_in_group(DType dtype) noexcept {
  return 8 / std::gcd(int{entry(dtype).bits}, 8);
}
std::string_view to_string(DType dtype) noexcept {
  return entry(dtype).name;
}

std::optional<DType> dtype_from_string(std::string_view name) noexcept {
  for (const CacheEntry& each : table)
    if (each.name == name) return each.dtype;
  return std::nullopt;
}

std::optional<DType> dtype_from_number(std::uint8_t number) noexcept {
  if (number >= table.size()) return std::nullopt;
  return table[number].dtype;
}

}  // namespace muster

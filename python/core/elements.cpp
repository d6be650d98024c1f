// SPDX-License-Identifier: Apache-2.0
#include "python/core/elements.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "muster/error.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {
namespace {

/// A float format of at most 16 bits with a sign.
struct SmallFloat {
  enum class Special : std::uint8_t {
    ieee,      ///< the largest exponent is for infinities and NaN
    one_nan,   ///< all bits except the sign set: NaN
    negative,  ///< minus zero is NaN
    none,      ///< only finite numbers
  };
  DType dtype;
  int exponent;  ///< bits of the exponent
  int mantissa;  ///< bits of the mantissa
  int bias;
  Special special;

  [[nodiscard]] float value(std::uint32_t bits) const {
    const std::uint32_t sign = bits >> (exponent + mantissa);
    const std::uint32_t magnitude = bits & ((1U << (exponent + mantissa)) - 1);
    const std::uint32_t power = magnitude >> mantissa;
    const std::uint32_t fraction = magnitude & ((1U << mantissa) - 1);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    float result = 0;
    if (special == Special::ieee && power == (1U << exponent) - 1)
      result = fraction != 0 ? nan : std::numeric_limits<float>::infinity();
    else if (special == Special::one_nan && magnitude == (1U << (exponent + mantissa)) - 1)
      result = nan;
    else if (special == Special::negative && sign != 0 && magnitude == 0)
      result = nan;
    else
      result = std::ldexp(static_cast<float>(power == 0 ? fraction : fraction + (1U << mantissa)),
                          std::max(static_cast<int>(power), 1) - bias - mantissa);
    return sign != 0 ? -result : result;
  }
};
constexpr std::array small_floats{
    SmallFloat{DType::f16, 5, 10, 15, SmallFloat::Special::ieee},
    SmallFloat{DType::bf16, 8, 7, 127, SmallFloat::Special::ieee},
    SmallFloat{DType::f8_e4m3fn, 4, 3, 7, SmallFloat::Special::one_nan},
    SmallFloat{DType::f8_e5m2, 5, 2, 15, SmallFloat::Special::ieee},
    SmallFloat{DType::f8_e4m3fnuz, 4, 3, 8, SmallFloat::Special::negative},
    SmallFloat{DType::f8_e5m2fnuz, 5, 2, 16, SmallFloat::Special::negative},
    SmallFloat{DType::f4_e2m1, 2, 1, 1, SmallFloat::Special::none},
    SmallFloat{DType::f6_e2m3, 2, 3, 1, SmallFloat::Special::none},
    SmallFloat{DType::f6_e3m2, 3, 2, 3, SmallFloat::Special::none},
};

/// Returns the bits of element `number` of a dtype of at most 16 bits.
std::uint32_t bits_of(const std::byte* data, std::int64_t number, int width) {
  const std::int64_t first = number * width;
  const std::int64_t last = first + width - 1;
  std::uint32_t bits = 0;
  for (std::int64_t byte = last / 8; byte >= first / 8; --byte)
    bits = (bits << 8) | std::to_integer<std::uint32_t>(data[byte]);
  return (bits >> (first % 8)) & ((1U << width) - 1);
}

template <class T>
T loaded(const std::byte* data, std::int64_t number) {
  T value;
  std::memcpy(&value, data + number * static_cast<std::int64_t>(sizeof value), sizeof value);
  return value;
}

std::optional<float> small_float(DType dtype, const std::byte* data, std::int64_t number) {
  if (dtype == DType::f8_e8m0) {
    const int power = std::to_integer<int>(data[number]);
    return power == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, power - 127);
  }
  const auto* const found = std::ranges::find(small_floats, dtype, &SmallFloat::dtype);
  if (found == small_floats.end()) return std::nullopt;
  return found->value(bits_of(data, number, bits(dtype)));
}

int packed_integer(DType dtype, const std::byte* data, std::int64_t number) {
  const auto value = static_cast<int>(bits_of(data, number, 4));
  return dtype == DType::i4 && value >= 8 ? value - 16 : value;
}

/// Returns element `number` of contiguous elements.
nb::object element(DType dtype, const std::byte* data, std::int64_t number) {
  switch (dtype) {
    case DType::boolean:
      return nb::bool_(data[number] != std::byte{0});
    case DType::u8:
      return nb::int_(loaded<std::uint8_t>(data, number));
    case DType::i8:
      return nb::int_(loaded<std::int8_t>(data, number));
    case DType::u16:
      return nb::int_(loaded<std::uint16_t>(data, number));
    case DType::i16:
      return nb::int_(loaded<std::int16_t>(data, number));
    case DType::u32:
      return nb::int_(loaded<std::uint32_t>(data, number));
    case DType::i32:
      return nb::int_(loaded<std::int32_t>(data, number));
    case DType::u64:
      return nb::int_(loaded<std::uint64_t>(data, number));
    case DType::i64:
      return nb::int_(loaded<std::int64_t>(data, number));
    case DType::f32:
      return nb::float_(loaded<float>(data, number));
    case DType::f64:
      return nb::float_(loaded<double>(data, number));
    case DType::complex64: {
      const auto value = loaded<std::array<float, 2>>(data, number);
      return nb::steal(PyComplex_FromDoubles(value[0], value[1]));
    }
    case DType::u4:
    case DType::i4:
      return nb::int_(packed_integer(dtype, data, number));
    default:
      return nb::float_(*small_float(dtype, data, number));
  }
}

/// Returns the elements in row-major order without gaps, on the host.
Tensor contiguous(const Tensor& tensor) {
  (void)tensor.view().host_data();  // refuses tensors on GPUs
  return tensor.view().is_contiguous() ? tensor : without_gil([&] { return Tensor::copy_of(tensor.view()); });
}

nb::object nested(const Tensor& tensor, std::size_t dim, std::int64_t& number) {
  if (dim == tensor.shape().size()) return element(tensor.dtype(), tensor.data(), number++);
  nb::list list;
  for (std::int64_t i = 0; i < tensor.shape()[dim]; ++i) list.append(nested(tensor, dim + 1, number));
  return list;
}

/// One dimension of a tensor, as an index changes it.
struct Selection {
  Shape shape;
  Strides strides;
  std::int64_t offset = 0;  // in elements
};

void select(Selection& selection, std::int64_t extent, std::int64_t stride, std::size_t dim, nb::handle item) {
  if (PySlice_Check(item.ptr()) != 0) {
    Py_ssize_t start = 0;
    Py_ssize_t stop = 0;
    Py_ssize_t step = 0;
    if (PySlice_Unpack(item.ptr(), &start, &stop, &step) != 0) throw nb::python_error();
    const Py_ssize_t count = PySlice_AdjustIndices(extent, &start, &stop, step);
    selection.shape.push_back(count);
    selection.strides.push_back(stride * step);
    if (count != 0) selection.offset += start * stride;
    return;
  }
  if (PyBool_Check(item.ptr()) != 0 || PyIndex_Check(item.ptr()) == 0)
    throw nb::type_error(
        fmt::format("an index of a tensor is an int, a slice, Ellipsis or a tuple of these, and not {}. "
                    "Use numpy() for others",
                    nb::type_name(item.type()).c_str())
            .c_str());
  const Py_ssize_t index = PyNumber_AsSsize_t(item.ptr(), PyExc_IndexError);
  if (index == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (index < -extent || index >= extent)
    throw nb::index_error(
        fmt::format("index {} is out of range for dimension {} of extent {}", index, dim, extent).c_str());
  selection.offset += (index < 0 ? index + extent : index) * stride;
}

}  // namespace

nb::object item_of(const Tensor& tensor) {
  if (tensor.view().element_count() != 1)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("item: {} has {} elements instead of 1: index one of them, or use tolist()",
                            to_string(TensorSpec{tensor.dtype(), tensor.shape()}), tensor.view().element_count()));
  return element(tensor.dtype(), contiguous(tensor).data(), 0);
}

nb::object list_of_elements(const Tensor& tensor) {
  std::int64_t number = 0;
  return nested(contiguous(tensor), 0, number);
}

Tensor widened(const Tensor& tensor) {
  const Tensor source = contiguous(tensor);
  const DType dtype = source.dtype();
  const bool is_integer = dtype == DType::u4 || dtype == DType::i4;
  if (!is_integer && dtype != DType::f8_e8m0 &&
      std::ranges::find(small_floats, dtype, &SmallFloat::dtype) == small_floats.end())
    throw Error(ErrorKind::invalid_argument, fmt::format("widened: {} is not a small float", to_string(dtype)));
  return without_gil([&] {
    const DType target = !is_integer ? DType::f32 : dtype == DType::i4 ? DType::i8 : DType::u8;
    const std::int64_t count = source.view().element_count();
    Tensor result = Tensor::allocate(target, source.shape());
    if (is_integer)
      for (std::int64_t i = 0; i < count; ++i)
        result.mutable_data()[i] = static_cast<std::byte>(packed_integer(dtype, source.data(), i));
    else
      std::ranges::generate(result.mutable_values<float>(),
                            [&, i = std::int64_t{0}]() mutable { return *small_float(dtype, source.data(), i++); });
    return result;
  });
}

Tensor indexed(const Tensor& tensor, nb::handle index) {
  const Shape& shape = tensor.shape();
  const nb::tuple items =
      nb::isinstance<nb::tuple>(index) ? nb::borrow<nb::tuple>(index) : nb::make_tuple(nb::borrow(index));
  std::size_t named = 0;
  bool has_ellipsis = false;
  for (const nb::handle item : items) {
    if (item.ptr() != Py_Ellipsis) {
      ++named;
    } else if (std::exchange(has_ellipsis, true)) {
      throw nb::index_error("an index has at most one Ellipsis (...)");
    }
  }
  if (named > shape.size())
    throw nb::index_error(fmt::format("{} indices for a tensor of {} dimensions", named, shape.size()).c_str());
  const Strides strides = full_strides(tensor.view());
  Selection selection;
  std::size_t dim = 0;
  const auto keep = [&](std::size_t count) {
    for (; count != 0; --count, ++dim) {
      selection.shape.push_back(shape[dim]);
      selection.strides.push_back(strides[dim]);
    }
  };
  for (const nb::handle item : items) {
    if (item.ptr() == Py_Ellipsis) {
      keep(shape.size() - named);
      continue;
    }
    select(selection, shape[dim], strides[dim], dim, item);
    ++dim;
  }
  keep(shape.size() - dim);

  const DType dtype = tensor.dtype();
  const std::int64_t first = selection.offset * bits(dtype);
  if (is_packed(dtype)) {
    // Only whole bytes in row-major order can be described.
    const std::int64_t count = element_count(selection.shape);
    const TensorView seen(DType::u8, selection.shape, tensor.data(), selection.strides);
    const bool is_last = selection.offset + count == tensor.view().element_count();
    if (!seen.is_contiguous() || first % 8 != 0 || (count * bits(dtype) % 8 != 0 && !is_last))
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("index: elements of {} share bytes, and this part does not consist of whole bytes in one "
                              "piece. Use numpy(dtype) for a copy with one element per item",
                              to_string(dtype)));
    selection.strides.clear();
  }
  const std::byte* data = tensor.data() == nullptr ? nullptr : tensor.data() + first / 8;
  const TensorView view(dtype, std::move(selection.shape), data, std::move(selection.strides), tensor.device());
  if (!tensor.is_writable()) return {view, tensor.owner()};
  return {view, tensor.owner(), tensor.mutable_data() + first / 8};
}

}  // namespace muster::python

// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/values.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/inspect/elements.hpp"

namespace muster::inspect {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// |a - b| exactly, where a double would round each first.
template <class Integer>
double distance(Integer a, Integer b) noexcept {
  using Unsigned = std::make_unsigned_t<Integer>;
  const Integer high = std::max(a, b);
  const Integer low = std::min(a, b);
  return static_cast<double>(static_cast<Unsigned>(static_cast<Unsigned>(high) - static_cast<Unsigned>(low)));
}

void note(ValueDifference& difference, double a, double b, double apart) noexcept {
  if (std::isnan(a) || std::isnan(b)) {
    difference.nans += std::isnan(a) != std::isnan(b) ? 1 : 0;
    return;
  }
  const double largest = std::max(std::abs(a), std::abs(b));
  difference.absolute = std::max(difference.absolute, apart);
  if (apart > 0 && !std::isinf(apart)) difference.relative = std::max(difference.relative, apart / largest);
  if (std::isinf(apart)) difference.relative = infinity;
}

/// Real numbers of `dtype`, whose bits are a T.
template <class T>
ValueDifference compare(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  ValueDifference difference;
  const std::size_t bytes = std::min(a.size(), b.size());
  for (std::size_t at = 0; at + sizeof(T) <= bytes; at += sizeof(T)) {
    T x{};
    T y{};
    // Files of other hands need not be aligned.
    std::memcpy(&x, a.data() + at, sizeof(T));
    std::memcpy(&y, b.data() + at, sizeof(T));
    if (x == y) continue;
    ++difference.elements;
    const double left = value_of(dtype, x);
    const double right = value_of(dtype, y);
    note(difference, left, right, std::abs(left - right));
  }
  return difference;
}

template <class Integer>
ValueDifference compare_integers(std::span<const std::byte> a, std::span<const std::byte> b) {
  ValueDifference difference;
  const std::size_t bytes = std::min(a.size(), b.size());
  for (std::size_t at = 0; at + sizeof(Integer) <= bytes; at += sizeof(Integer)) {
    Integer x{};
    Integer y{};
    std::memcpy(&x, a.data() + at, sizeof(Integer));
    std::memcpy(&y, b.data() + at, sizeof(Integer));
    if (x == y) continue;
    ++difference.elements;
    note(difference, static_cast<double>(x), static_cast<double>(y), distance(x, y));
  }
  return difference;
}

ValueDifference compare_nibbles(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  ValueDifference difference;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    for (const std::uint64_t half : {0U, 1U}) {
      const std::uint64_t x = value_bits(dtype, a, i * 2 + half);
      const std::uint64_t y = value_bits(dtype, b, i * 2 + half);
      if (x == y) continue;
      ++difference.elements;
      const double left = value_of(dtype, x);
      const double right = value_of(dtype, y);
      note(difference, left, right, std::abs(left - right));
    }
  }
  return difference;
}

}  // namespace

void ValueDifference::add(const ValueDifference& other) noexcept {
  elements += other.elements;
  nans += other.nans;
  absolute = std::max(absolute, other.absolute);
  relative = std::max(relative, other.relative);
}

ValueDifference compare_values(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
      return compare_integers<std::uint8_t>(a, b);
    case DType::i8:
      return compare_integers<std::int8_t>(a, b);
    case DType::u16:
      return compare_integers<std::uint16_t>(a, b);
    case DType::i16:
      return compare_integers<std::int16_t>(a, b);
    case DType::u32:
      return compare_integers<std::uint32_t>(a, b);
    case DType::i32:
      return compare_integers<std::int32_t>(a, b);
    case DType::u64:
      return compare_integers<std::uint64_t>(a, b);
    case DType::i64:
      return compare_integers<std::int64_t>(a, b);
    case DType::f16:
    case DType::bf16:
      return compare<std::uint16_t>(dtype, a, b);
    case DType::f32:
    case DType::complex64:
      return compare<std::uint32_t>(dtype, a, b);
    case DType::f64:
      return compare<std::uint64_t>(dtype, a, b);
    case DType::f8_e4m3fn:
    case DType::f8_e5m2:
    case DType::f8_e8m0:
      return compare<std::uint8_t>(dtype, a, b);
    case DType::f4_e2m1:
    case DType::u4:
    case DType::i4:
      return compare_nibbles(dtype, a, b);
  }
  return {};
}

}  // namespace muster::inspect

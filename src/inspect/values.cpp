// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/values.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace muster::inspect {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// A small IEEE-like float, decoded. `has_infinity`: the highest exponent means infinity and NaN; else only all ones
/// is NaN.
constexpr double decode(unsigned word, int exponent_bits, int mantissa_bits, int bias, bool has_infinity) {
  const unsigned mantissa_mask = (1U << mantissa_bits) - 1;
  const unsigned exponent_mask = (1U << exponent_bits) - 1;
  const unsigned mantissa = word & mantissa_mask;
  const unsigned exponent = (word >> mantissa_bits) & exponent_mask;
  const bool is_negative = ((word >> (mantissa_bits + exponent_bits)) & 1U) != 0;
  if (exponent == exponent_mask) {
    if (has_infinity) return mantissa != 0 ? nan : is_negative ? -infinity : infinity;
    if (mantissa == mantissa_mask) return nan;
  }
  double value = exponent == 0 ? mantissa : mantissa + mantissa_mask + 1;
  int scale = (exponent == 0 ? 1 : static_cast<int>(exponent)) - bias - mantissa_bits;
  for (; scale > 0; --scale) value *= 2;
  for (; scale < 0; ++scale) value /= 2;
  return is_negative ? -value : value;
}

template <class Decode>
constexpr std::array<double, 256> make_table(Decode&& decode_byte) {
  std::array<double, 256> table{};
  for (unsigned i = 0; i < 256; ++i) table[i] = decode_byte(i);
  return table;
}

constexpr auto e4m3fn = make_table([](unsigned byte) { return decode(byte, 4, 3, 7, false); });
constexpr auto e5m2 = make_table([](unsigned byte) { return decode(byte, 5, 2, 15, true); });
constexpr std::array<double, 16> e2m1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

double e8m0(unsigned byte) noexcept {
  return byte == 255 ? nan : std::ldexp(1.0, static_cast<int>(byte) - 127);
}

double bf16(std::uint16_t word) noexcept {
  return std::bit_cast<float>(std::uint32_t{word} << 16);
}

double f16(std::uint16_t word) noexcept {
  const unsigned exponent = (word >> 10) & 31U;
  if (exponent == 0 || exponent == 31) return decode(word, 5, 10, 15, true);
  const std::uint32_t wide =
      (std::uint32_t{word & 0x8000U} << 16) | ((exponent + 112) << 23) | (std::uint32_t{word & 0x3ffU} << 13);
  return std::bit_cast<float>(wide);
}

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

/// Elements of type T, as bits; `value` makes doubles of them.
template <class T, class Value>
ValueDifference compare(std::span<const std::byte> a, std::span<const std::byte> b, Value&& value) {
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
    const double left = value(x);
    const double right = value(y);
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

template <class Value>
ValueDifference compare_nibbles(std::span<const std::byte> a, std::span<const std::byte> b, Value&& value) {
  ValueDifference difference;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    for (const unsigned shift : {0U, 4U}) {
      const unsigned x = (std::to_integer<unsigned>(a[i]) >> shift) & 15U;
      const unsigned y = (std::to_integer<unsigned>(b[i]) >> shift) & 15U;
      if (x == y) continue;
      ++difference.elements;
      note(difference, value(x), value(y), std::abs(value(x) - value(y)));
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
      return compare<std::uint16_t>(a, b, f16);
    case DType::bf16:
      return compare<std::uint16_t>(a, b, bf16);
    case DType::f32:
    case DType::complex64:
      return compare<std::uint32_t>(a, b, [](std::uint32_t word) -> double { return std::bit_cast<float>(word); });
    case DType::f64:
      return compare<std::uint64_t>(a, b, [](std::uint64_t word) { return std::bit_cast<double>(word); });
    case DType::f8_e4m3fn:
      return compare<std::uint8_t>(a, b, [](unsigned byte) { return e4m3fn[byte]; });
    case DType::f8_e5m2:
      return compare<std::uint8_t>(a, b, [](unsigned byte) { return e5m2[byte]; });
    case DType::f8_e8m0:
      return compare<std::uint8_t>(a, b, e8m0);
    case DType::f4_e2m1:
      return compare_nibbles(a, b, [](unsigned nibble) { return e2m1[nibble]; });
    case DType::u4:
      return compare_nibbles(a, b, [](unsigned nibble) { return static_cast<double>(nibble); });
    case DType::i4:
      return compare_nibbles(a, b, [](unsigned nibble) { return static_cast<double>(nibble) - (nibble < 8 ? 0 : 16); });
  }
  return {};
}

}  // namespace muster::inspect

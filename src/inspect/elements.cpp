// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/elements.hpp"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <charconv>
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

double f16(std::uint16_t word) noexcept {
  const unsigned exponent = (word >> 10) & 31U;
  if (exponent == 0 || exponent == 31) return decode(word, 5, 10, 15, true);
  const std::uint32_t wide =
      (std::uint32_t{word & 0x8000U} << 16) | ((exponent + 112) << 23) | (std::uint32_t{word & 0x3ffU} << 13);
  return std::bit_cast<float>(wide);
}

std::int64_t extended(DType dtype, std::uint64_t word) noexcept {
  const int unused = 64 - bits(dtype);
  return static_cast<std::int64_t>(word << unused) >> unused;
}

struct Precision {
  int digits = 0;        // of the significand after the first, in binary
  int smallest = 0;      // exponent of the smallest normal number
  bool has_zero = true;  // 0 is a neighbour of the smallest
};

Precision precision_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
      return {10, -14};
    case DType::bf16:
      return {7, -126};
    case DType::f8_e4m3fn:
      return {3, -6};
    case DType::f8_e5m2:
      return {2, -14};
    case DType::f8_e8m0:
      return {0, -127, false};
    case DType::f4_e2m1:
      return {1, 0};
    case DType::f64:
      return {52, -1022};
    default:
      return {23, -126};
  }
}

// The narrower floats: whether a decimal is nearer to `value` than to its neighbours.
bool reads_back(const Precision& precision, double value, double decimal) noexcept {
  const int exponent = std::max(std::ilogb(value), precision.smallest);
  const double step = std::ldexp(1.0, exponent - precision.digits);
  const double apart = std::abs(decimal) - std::abs(value);
  // Below a power of two the numbers lie twice as close.
  const bool is_power = std::abs(value) == std::ldexp(1.0, exponent) && (exponent > precision.smallest);
  return apart < step / 2 && -apart < step / (is_power ? 4 : 2);
}

}  // namespace

DType value_dtype(DType dtype) noexcept {
  return dtype == DType::complex64 ? DType::f32 : dtype;
}

std::uint64_t values_per_element(DType dtype) noexcept {
  return dtype == DType::complex64 ? 2 : 1;
}

std::uint64_t values_in(DType dtype, std::uint64_t bytes) noexcept {
  return is_packed(dtype) ? bytes * 2 : bytes / itemsize(value_dtype(dtype));
}

std::uint64_t value_bits(DType dtype, std::span<const std::byte> run, std::uint64_t index) noexcept {
  static_assert(std::endian::native == std::endian::little);
  if (is_packed(dtype)) return (std::to_integer<std::uint64_t>(run[index / 2]) >> (index % 2 == 0 ? 0U : 4U)) & 15U;
  const std::size_t size = itemsize(value_dtype(dtype));
  std::uint64_t word = 0;
  std::memcpy(&word, run.data() + index * size, size);
  return word;
}

double value_of(DType dtype, std::uint64_t word) noexcept {
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::u4:
      return static_cast<double>(word);
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::i4:
      return static_cast<double>(extended(dtype, word));
    case DType::f16:
      return f16(static_cast<std::uint16_t>(word));
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(word) << 16);
    case DType::f32:
    case DType::complex64:
      return std::bit_cast<float>(static_cast<std::uint32_t>(word));
    case DType::f64:
      return std::bit_cast<double>(word);
    case DType::f8_e4m3fn:
      return e4m3fn[word & 255U];
    case DType::f8_e5m2:
      return e5m2[word & 255U];
    case DType::f8_e8m0:
      return word == 255 ? nan : std::ldexp(1.0, static_cast<int>(word) - 127);
    case DType::f4_e2m1:
      return e2m1[word & 15U];
  }
  return nan;
}

Config exact_value(DType dtype, std::uint64_t word) {
  switch (dtype) {
    case DType::boolean:
      return word != 0;
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::u4:
      return word;
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::i4:
      return extended(dtype, word);
    default:
      return value_of(dtype, word);
  }
}

bool is_integer(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64:
    case DType::f8_e4m3fn:
    case DType::f8_e5m2:
    case DType::f8_e8m0:
    case DType::f4_e2m1:
    case DType::complex64:
      return false;
    default:
      return true;
  }
}

Config json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
}

int value_digits(DType dtype, double value) noexcept {
  std::array<char, 40> text{};
  if (dtype == DType::f64 || dtype == DType::f32 || dtype == DType::complex64) {
    const auto end = dtype == DType::f64
                         ? std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::scientific)
                         : std::to_chars(text.data(), text.data() + text.size(), static_cast<float>(value),
                                         std::chars_format::scientific);
    int digits = 0;
    for (const char* at = text.data(); at != end.ptr && *at != 'e'; ++at) digits += *at >= '0' && *at <= '9' ? 1 : 0;
    return digits;
  }
  const Precision precision = precision_of(dtype);
  for (int digits = 1; digits < 17; ++digits) {
    const auto end =
        std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::scientific, digits - 1);
    double decimal = 0;
    std::from_chars(text.data(), end.ptr, decimal);
    if (reads_back(precision, value, decimal)) return digits;
  }
  return 17;
}

std::string value_text(DType dtype, std::uint64_t word) {
  if (dtype == DType::boolean) return word != 0 ? "True" : "False";
  if (is_integer(dtype)) {
    const Config value = exact_value(dtype, word);
    return value.type() == Config::Type::unsigned_integer ? fmt::to_string(value.as_uint())
                                                          : fmt::to_string(value.as_int());
  }
  const double value = value_of(dtype, word);
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
  if (value == 0) return std::signbit(value) ? "-0" : "0";
  return fmt::format("{:.{}g}", value, value_digits(dtype, value));
}

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/elements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace muster::inspect {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// The meaning of a small float's codes that are not numbers.
enum class Special : std::uint8_t {
  infinities,  ///< the highest exponent is infinity and NaN, as in IEEE 754
  ones,        ///< all ones are NaN
  none,
  nan_is_zero,  ///< the code of -0 is NaN
};

/// Decodes a small IEEE-like float.
constexpr double decode(unsigned word, int exponent_bits, int mantissa_bits, int bias, Special special) {
  const unsigned mantissa_mask = (1U << mantissa_bits) - 1;
  const unsigned exponent_mask = (1U << exponent_bits) - 1;
  const unsigned mantissa = word & mantissa_mask;
  const unsigned exponent = (word >> mantissa_bits) & exponent_mask;
  const bool is_negative = ((word >> (mantissa_bits + exponent_bits)) & 1U) != 0;
  if (exponent == exponent_mask) {
    if (special == Special::infinities) return mantissa != 0 ? nan : is_negative ? -infinity : infinity;
    if (special == Special::ones && mantissa == mantissa_mask) return nan;
  }
  if (special == Special::nan_is_zero && is_negative && exponent == 0 && mantissa == 0) return nan;
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

constexpr auto e4m3fn = make_table([](unsigned byte) { return decode(byte, 4, 3, 7, Special::ones); });
constexpr auto e5m2 = make_table([](unsigned byte) { return decode(byte, 5, 2, 15, Special::infinities); });
constexpr auto e4m3fnuz = make_table([](unsigned byte) { return decode(byte, 4, 3, 8, Special::nan_is_zero); });
constexpr auto e5m2fnuz = make_table([](unsigned byte) { return decode(byte, 5, 2, 16, Special::nan_is_zero); });
constexpr auto e2m3 = make_table([](unsigned byte) { return decode(byte, 2, 3, 1, Special::none); });
constexpr auto e3m2 = make_table([](unsigned byte) { return decode(byte, 3, 2, 3, Special::none); });
constexpr std::array<double, 16> e2m1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

double f16(std::uint16_t word) noexcept {
  const unsigned exponent = (word >> 10) & 31U;
  if (exponent == 0 || exponent == 31) return decode(word, 5, 10, 15, Special::infinities);
  const std::uint32_t wide =
      (std::uint32_t{word & 0x8000U} << 16) | ((exponent + 112) << 23) | (std::uint32_t{word & 0x3ffU} << 13);
  return std::bit_cast<float>(wide);
}

enum class ElementKind : std::uint8_t { boolean, unsigned_integer, signed_integer, real };

ElementKind kind_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::boolean:
      return ElementKind::boolean;
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::u4:
      return ElementKind::unsigned_integer;
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::i4:
      return ElementKind::signed_integer;
    default:
      return ElementKind::real;
  }
}

std::int64_t extended(DType dtype, std::uint64_t word) noexcept {
  const int unused = 64 - bits(dtype);
  return static_cast<std::int64_t>(word << unused) >> unused;
}

// For the narrower floats: whether a decimal is nearer to a value than to its neighbours. The largest value has no
// upper neighbour.
bool reads_back(DType dtype, std::uint64_t word, double decimal) noexcept {
  const double value = value_of(dtype, word);
  const double apart = std::abs(decimal) - std::abs(value);
  // At the end of the codes, a neighbour has the other sign, or is not a number.
  const double less = std::abs(value_of(dtype, word - 1));
  const double more = std::abs(value_of(dtype, word + 1));
  const double below = std::abs(value) - (less < std::abs(value) ? less : 0);
  const double above = more > std::abs(value) ? more - std::abs(value) : infinity;
  return -apart < below / 2 && apart < (std::isfinite(above) ? above : below) / 2;
}

constexpr int most_digits = 8;  // after the point, for the numbers of an array

// Returns |a - b| of integers exactly: the difference of their bits. Doubles would round the integers first.
double integer_distance(DType dtype, std::uint64_t a, std::uint64_t b) noexcept {
  if (std::pair(value_of(dtype, a), a) < std::pair(value_of(dtype, b), b)) std::swap(a, b);
  const int unused = 64 - bits(dtype);
  return static_cast<double>((a - b) << unused >> unused);
}

void note(ValueDifference& difference, DType dtype, std::uint64_t x, std::uint64_t y) noexcept {
  if (x == y) return;
  ++difference.elements;
  const double a = value_of(dtype, x);
  const double b = value_of(dtype, y);
  if (std::isnan(a) || std::isnan(b)) {
    difference.nans += std::isnan(a) != std::isnan(b) ? 1 : 0;
    return;
  }
  const double apart = is_integer(dtype) ? integer_distance(dtype, x, y) : std::abs(a - b);
  difference.absolute = std::max(difference.absolute, apart);
  if (apart > 0 && !std::isinf(apart))
    difference.relative = std::max(difference.relative, apart / std::max(std::abs(a), std::abs(b)));
  if (std::isinf(apart)) difference.relative = infinity;
}

/// Compares values whose bits are a Word.
template <class Word>
void compare(ValueDifference& difference, DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  for (std::size_t at = 0; at + sizeof(Word) <= std::min(a.size(), b.size()); at += sizeof(Word)) {
    Word x{};
    Word y{};
    // Data in files of other programs may be misaligned.
    std::memcpy(&x, a.data() + at, sizeof(Word));
    std::memcpy(&y, b.data() + at, sizeof(Word));
    note(difference, dtype, x, y);
  }
}

}  // namespace

DType value_dtype(DType dtype) noexcept {
  return dtype == DType::complex64 ? DType::f32 : dtype;
}

std::uint64_t values_per_element(DType dtype) noexcept {
  return dtype == DType::complex64 ? 2 : 1;
}

std::uint64_t values_in(DType dtype, std::uint64_t bytes) noexcept {
  return bytes * 8 / static_cast<std::uint64_t>(bits(value_dtype(dtype)));
}

std::uint64_t value_bits(DType dtype, std::span<const std::byte> run, std::uint64_t index) noexcept {
  static_assert(std::endian::native == std::endian::little);
  if (is_packed(dtype)) {
    const auto size = static_cast<std::uint64_t>(bits(dtype));
    const std::uint64_t at = index * size / 8;
    const std::uint64_t begin = index * size % 8;
    std::uint64_t word = std::to_integer<std::uint64_t>(run[at]);
    if (begin + size > 8 && at + 1 < run.size()) word |= std::to_integer<std::uint64_t>(run[at + 1]) << 8;
    return (word >> begin) & ((1U << size) - 1);
  }
  const std::size_t size = itemsize(value_dtype(dtype));
  std::uint64_t word = 0;
  std::memcpy(&word, run.data() + index * size, size);
  return word;
}

bool is_integer(DType dtype) noexcept {
  return kind_of(dtype) != ElementKind::real;
}

double value_of(DType dtype, std::uint64_t word) noexcept {
  switch (dtype) {
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
    case DType::f8_e4m3fnuz:
      return e4m3fnuz[word & 255U];
    case DType::f8_e5m2fnuz:
      return e5m2fnuz[word & 255U];
    case DType::f6_e2m3:
      return e2m3[word & 63U];
    case DType::f6_e3m2:
      return e3m2[word & 63U];
    default:
      return kind_of(dtype) == ElementKind::signed_integer ? static_cast<double>(extended(dtype, word))
                                                           : static_cast<double>(word);
  }
}

Config exact_value(DType dtype, std::uint64_t word) {
  switch (kind_of(dtype)) {
    case ElementKind::boolean:
      return word != 0;
    case ElementKind::unsigned_integer:
      return word;
    case ElementKind::signed_integer:
      return extended(dtype, word);
    case ElementKind::real:
      break;
  }
  return value_of(dtype, word);
}

Config json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
}

Config json_number(const Config& value) {
  return value.type() == Config::Type::real ? json_number(value.as_double()) : value;
}

int value_digits(DType dtype, std::uint64_t word) noexcept {
  const double value = value_of(dtype, word);
  std::array<char, 40> text{};
  char* const room = text.data() + text.size();
  if (bits(value_dtype(dtype)) >= 32) {
    const auto end = dtype == DType::f64
                         ? std::to_chars(text.data(), room, value, std::chars_format::scientific)
                         : std::to_chars(text.data(), room, static_cast<float>(value), std::chars_format::scientific);
    return static_cast<int>(
        std::count_if(text.data(), std::find(text.data(), end.ptr, 'e'), [](char c) { return c >= '0' && c <= '9'; }));
  }
  for (int digits = 1; digits < 17; ++digits) {
    const auto end = std::to_chars(text.data(), room, value, std::chars_format::scientific, digits - 1);
    double decimal = 0;
    std::from_chars(text.data(), end.ptr, decimal);
    if (reads_back(dtype, word, decimal)) return digits;
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
  return fmt::format("{:.{}g}", value, value_digits(dtype, word));
}

void ArrayFormat::note(std::uint64_t bits) {
  if (is_integer(dtype_)) {
    width_ = std::max(width_, value_text(dtype_, bits).size());
    return;
  }
  const double value = value_of(dtype_, bits);
  if (!std::isfinite(value)) {
    width_ = std::max<std::size_t>(width_, std::isnan(value) || value > 0 ? 3 : 4);
    return;
  }
  has_numbers_ = true;
  has_sign_ = has_sign_ || std::signbit(value);
  if (value == 0) {
    left_ = std::max<std::size_t>(left_, std::signbit(value) ? 2 : 1);
    return;
  }
  const double magnitude = std::abs(value);
  largest_ = std::max(largest_, magnitude);
  smallest_ = smallest_ == 0 ? magnitude : std::min(smallest_, magnitude);
  const int digits = value_digits(dtype_, bits);
  // The decimal exponent as printed, after rounding.
  const std::string text = fmt::format("{:.{}e}", magnitude, digits - 1);
  const int exponent = std::stoi(text.substr(text.find('e') + 1));
  significant_ = std::max(significant_, digits);
  fraction_ = std::max(fraction_, std::min(digits - 1 - exponent, most_digits));
  left_ = std::max(left_, static_cast<std::size_t>(std::max(exponent, 0) + 1 + (std::signbit(value) ? 1 : 0)));
}

bool ArrayFormat::is_scientific() const noexcept {
  return largest_ >= 1e8 || (smallest_ > 0 && (smallest_ < 1e-4 || largest_ / smallest_ > 1000));
}

std::string ArrayFormat::number(double value) const {
  if (is_scientific()) {
    const int digits = std::clamp(significant_ - 1, 1, most_digits);
    const std::string text = fmt::format("{:.{}e}", value, digits);
    return has_sign_ && !std::signbit(value) ? " " + text : text;
  }
  std::string text = fmt::format("{:.{}f}", value, fraction_);
  if (fraction_ == 0) {
    text += '.';
  } else {
    // Trailing zeros carry no information; blanks keep the points aligned.
    for (std::size_t i = text.size(); i-- > 0 && text[i] == '0';) text[i] = ' ';
  }
  const std::size_t point = text.find('.');
  return point < left_ ? std::string(left_ - point, ' ') + text : text;
}

std::string ArrayFormat::text(std::uint64_t bits) const {
  if (is_integer(dtype_)) return fmt::format("{:>{}}", value_text(dtype_, bits), width_);
  const double value = value_of(dtype_, bits);
  if (std::isfinite(value)) {
    const std::string text = number(value);
    return text.size() < width_ ? std::string(width_ - text.size(), ' ') + text : text;
  }
  const std::size_t width = std::max(width_, has_numbers_ ? number(0).size() : 0);
  return fmt::format("{:>{}}", value_text(dtype_, bits), width);
}

void ValueDifference::add(const ValueDifference& other) noexcept {
  elements += other.elements;
  nans += other.nans;
  absolute = std::max(absolute, other.absolute);
  relative = std::max(relative, other.relative);
}

ValueDifference compare_values(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  ValueDifference difference;
  switch (bits(value_dtype(dtype))) {
    case 64:
      compare<std::uint64_t>(difference, dtype, a, b);
      break;
    case 32:
      compare<std::uint32_t>(difference, dtype, a, b);
      break;
    case 16:
      compare<std::uint16_t>(difference, dtype, a, b);
      break;
    case 8:
      compare<std::uint8_t>(difference, dtype, a, b);
      break;
    default:
      // Bits after the last element belong to the tensor, too.
      for (std::uint64_t i = 0; i * static_cast<std::uint64_t>(bits(dtype)) < std::min(a.size(), b.size()) * 8; ++i)
        note(difference, dtype, value_bits(dtype, a, i), value_bits(dtype, b, i));
  }
  return difference;
}

}  // namespace muster::inspect

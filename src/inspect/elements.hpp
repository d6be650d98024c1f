// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements one by one: their bits, and the numbers that these stand for. For what looks at values; what reckons with
// whole tensors has its own ways (src/merge/reduce.hpp). A complex number is two values of F32 here.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "muster/config.hpp"
#include "muster/dtype.hpp"

namespace muster::inspect {

/// The dtype of one value: that of the tensor, F32 for complex numbers.
DType value_dtype(DType dtype) noexcept;
/// Values of an element: 2 for complex numbers, else 1.
std::uint64_t values_per_element(DType dtype) noexcept;
/// Values in `bytes` bytes; both halves of each byte count for packed types.
std::uint64_t values_in(DType dtype, std::uint64_t bytes) noexcept;

/// The bits of a value of a run that holds it, in the low bits; nothing need be aligned.
std::uint64_t value_bits(DType dtype, std::span<const std::byte> run, std::uint64_t index) noexcept;

/// The number that bits stand for; integers beyond 53 bits are rounded.
double value_of(DType dtype, std::uint64_t bits) noexcept;

/// Likewise exactly: an integer for integer types, a boolean for BOOL, else a real number.
Config exact_value(DType dtype, std::uint64_t bits);

/// Integers and booleans.
bool is_integer(DType dtype) noexcept;

/// What a real number of JSON is: the number, or the string "nan", "inf" or "-inf".
Config json_number(double value);

/// The fewest digits that read back as the same value of this dtype, as "0.1", "1e-07", "nan" or "-inf". Integers in
/// full, booleans as "True" and "False".
std::string value_text(DType dtype, std::uint64_t bits);

/// Significant decimal digits that value_text needs, of a finite number that is not 0; at most 17.
int value_digits(DType dtype, std::uint64_t bits) noexcept;

/// Numbers of an array as NumPy prints them: all as wide as each other, points below points. First all values are shown
/// to it, then it makes their text.
class ArrayFormat {
 public:
  explicit ArrayFormat(DType dtype) : dtype_(dtype) {}
  void note(std::uint64_t bits);
  [[nodiscard]] std::string text(std::uint64_t bits) const;
  /// Whether any value has a minus sign.
  [[nodiscard]] bool has_sign() const noexcept { return has_sign_; }

 private:
  [[nodiscard]] bool is_scientific() const noexcept;
  [[nodiscard]] std::string number(double value) const;

  DType dtype_;
  std::size_t width_ = 0;  // of integers and booleans, and of what is not finite
  double largest_ = 0;     // magnitudes of what is finite and not 0
  double smallest_ = 0;
  int significant_ = 1;   // digits, as many as the value that needs most
  int fraction_ = 0;      // digits behind the point, likewise
  std::size_t left_ = 1;  // columns before the point, with the sign
  bool has_sign_ = false;
  bool has_numbers_ = false;
};

/// How far two runs of elements are apart.
struct ValueDifference {
  std::uint64_t elements = 0;  ///< whose bits differ
  std::uint64_t nans = 0;      ///< of these, NaN on one side only
  double absolute = 0;         ///< the largest |a - b|; infinite if one of them is
  double relative = 0;         ///< the largest |a - b| / max(|a|, |b|)

  void add(const ValueDifference& other) noexcept;
};

/// Of the elements of equally long runs; complex numbers are pairs of F32. NaN on both sides, and 0 beside -0, count as
/// elements but are no distance apart. Where the last byte of a packed dtype is half used, both halves count.
ValueDifference compare_values(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace muster::inspect

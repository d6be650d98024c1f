// SPDX-License-Identifier: Apache-2.0
#pragma once
// Access to single elements: their bits, and the numbers that these represent. Code that computes with whole tensors
// uses src/merge/reduce.hpp instead. A complex number counts as two F32 values here.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "muster/config.hpp"
#include "muster/dtype.hpp"

namespace muster::inspect {

/// Returns the dtype of one value: F32 for complex numbers, otherwise that of the tensor.
DType value_dtype(DType dtype) noexcept;
/// Returns the values per element: 2 for complex numbers, otherwise 1.
std::uint64_t values_per_element(DType dtype) noexcept;
/// Returns the number of values in `bytes` bytes; for packed types both halves of each byte count.
std::uint64_t values_in(DType dtype, std::uint64_t bytes) noexcept;

/// Returns the bits of value `index` of `run` in the low bits. No alignment is required.
std::uint64_t value_bits(DType dtype, std::span<const std::byte> run, std::uint64_t index) noexcept;

/// Returns the number that `bits` represent; integers beyond 53 bits are rounded.
double value_of(DType dtype, std::uint64_t bits) noexcept;

/// Returns the number without rounding: an integer for integer types, a boolean for BOOL, otherwise a real number.
Config exact_value(DType dtype, std::uint64_t bits);

/// Whether the type is an integer or a boolean.
bool is_integer(DType dtype) noexcept;

/// Returns a real number for JSON: the number, or the string "nan", "inf" or "-inf".
Config json_number(double value);
/// Returns an exact_value() for JSON: real numbers as above, others unchanged.
Config json_number(const Config& value);

/// Returns the shortest text that reads back as the same value of this dtype, such as "0.1", "1e-07", "nan" or "-inf".
/// Integers are printed in full, booleans as "True" and "False".
std::string value_text(DType dtype, std::uint64_t bits);

/// Returns the number of significant decimal digits that value_text prints, for a finite number that is not 0; at most
/// 17.
int value_digits(DType dtype, std::uint64_t bits) noexcept;

/// Formats the numbers of an array as NumPy does: in equal width, with aligned decimal points. All values must be added
/// before text() is called.
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
  std::size_t width_ = 0;  // for integers, booleans, and values that are not finite
  double largest_ = 0;     // magnitudes of finite values that are not 0
  double smallest_ = 0;
  int significant_ = 1;   // significant digits: the largest number that a value needs
  int fraction_ = 0;      // digits after the point: the largest number that a value needs
  std::size_t left_ = 1;  // columns before the point, including the sign
  bool has_sign_ = false;
  bool has_numbers_ = false;
};

/// The difference between two runs of elements.
struct ValueDifference {
  std::uint64_t elements = 0;  ///< whose bits differ
  std::uint64_t nans = 0;      ///< elements among them that are NaN on one side only
  double absolute = 0;         ///< the largest |a - b|; infinite if one of them is
  double relative = 0;         ///< the largest |a - b| / max(|a|, |b|)

  void add(const ValueDifference& other) noexcept;
};

/// Compares runs of equal length; complex numbers are pairs of F32. NaN on both sides, and 0 compared with -0, count as
/// different elements, but have no distance. If the last byte of a packed dtype is half used, both halves count.
ValueDifference compare_values(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace muster::inspect

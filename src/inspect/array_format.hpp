// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers of an array as NumPy prints them: all as wide as each other, points below points.

#include <cstddef>
#include <cstdint>
#include <string>

#include "muster/dtype.hpp"

namespace muster::inspect {

/// First all values are shown to it, then it makes their text.
class ArrayFormat {
 public:
  explicit ArrayFormat(DType dtype) : dtype_(dtype) {}
  void note(std::uint64_t bits);
  [[nodiscard]] std::string text(std::uint64_t bits) const;

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

}  // namespace muster::inspect

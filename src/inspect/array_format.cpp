// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/array_format.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "src/inspect/elements.hpp"

namespace muster::inspect {
namespace {

constexpr int most_digits = 8;  // behind the point

}  // namespace

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
  const int digits = value_digits(value_dtype(dtype_), value);
  // Decimal exponent as it is printed, after rounding.
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
    // Zeros at the end say nothing; blanks keep the points below each other.
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

}  // namespace muster::inspect

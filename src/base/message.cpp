// SPDX-License-Identifier: Apache-2.0
#include "src/base/message.hpp"

#include <array>
#include <cmath>

#include <fmt/format.h>

namespace muster {

std::string out_of_range_text(std::string_view name, std::int64_t value, std::int64_t size) {
  if (size < 1) return fmt::format("{} {} is out of range: size {} must be at least 1", name, value, size);
  return fmt::format("{} {} is out of range for size {} (valid: 0 to {})", name, value, size, size - 1);
}

std::string byte_text(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> units = {"MiB", "GiB", "TiB", "PiB", "EiB"};
  std::string text = fmt::format("{} bytes", bytes);
  double number = std::ldexp(static_cast<double>(bytes), -20);
  if (number < 1) return text;
  std::size_t unit = 0;
  for (; number >= 1024 && unit + 1 < units.size(); ++unit) number /= 1024;
  return text + fmt::format(" ({:.1f} {})", number, units[unit]);
}

std::string_view plural(std::uint64_t count) noexcept {
  return count == 1 ? "" : "s";
}

std::string counted(std::uint64_t count, std::string_view things) {
  return fmt::format("{} {}{}", count, things, plural(count));
}

Error with_remedy(const Error& error, std::string_view remedy) {
  return {error.kind(), fmt::format("{}. {}", error.what(), remedy), error.details()};
}

}  // namespace muster

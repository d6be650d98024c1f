// SPDX-License-Identifier: Apache-2.0
#include "muster/error.hpp"

#include <array>
#include <utility>

#include "src/base/escaped.hpp"

namespace muster {

std::string_view to_string(ErrorKind kind) noexcept {
  // In the order of the kinds.
  constexpr std::array<std::string_view, 11> names = {"invalid argument", "not found",     "corrupt",      "version",
                                                      "timeout",          "peer lost",     "out of space", "io",
                                                      "unsupported",      "rank mismatch", "cancelled"};
  static_assert(names.size() == std::size_t{static_cast<std::uint8_t>(ErrorKind::cancelled)} + 1);
  const auto number = static_cast<std::uint8_t>(kind);
  return number < names.size() ? names[number] : "unknown";
}

Error::Error(ErrorKind kind, const std::string& message, ErrorDetails details)
    : std::runtime_error(escaped(message)), kind_(kind), details_(std::move(details)) {}

Error Error::with_context(std::string_view context) const {
  return Error(kind_, std::string(context) + ": " + what(), details_);
}

}  // namespace muster

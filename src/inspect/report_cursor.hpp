// SPDX-License-Identifier: Apache-2.0
#pragma once
// The fields of a report of muster-hdf5-reader (src/hdf5/foreign_report.hpp): numbers of variable length and texts.

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "muster/error.hpp"

namespace muster::inspect {

/// Throws Error(corrupt).
[[noreturn]] inline void throw_report(const std::string& what) {
  throw Error(ErrorKind::corrupt, "the report of muster-hdf5-reader contradicts its format (" + what + ")");
}

/// Numbers and texts of a report, one after the other. Throws Error(corrupt) on what no writer makes, Cut where the
/// report ends in their midst. As long-lived as the report.
class ReportCursor {
 public:
  explicit ReportCursor(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool is_at_end() const noexcept { return bytes_.empty(); }
  std::uint8_t byte() {
    if (bytes_.empty()) throw Cut{};
    const auto value = std::to_integer<std::uint8_t>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return value;
  }
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      const std::uint64_t next = byte();
      if (shift == 63 && next > 1) throw_report("a number of more than 64 bits");
      value |= (next & 0x7fU) << shift;
      if (next < 0x80) return value;
    }
  }
  std::uint64_t number_below(std::uint64_t limit, const char* what) {
    const std::uint64_t value = number();
    if (value >= limit) throw_report(fmt::format("{} {}", what, value));
    return value;
  }
  std::int64_t signed_number() {
    const std::uint64_t value = number();
    return static_cast<std::int64_t>(value >> 1U) ^ -static_cast<std::int64_t>(value & 1U);
  }
  std::string_view text(std::uint64_t most) {
    const std::uint64_t length = number();
    if (length > most) throw_report(fmt::format("a text of {} bytes", length));
    if (length > bytes_.size()) throw Cut{};
    const std::string_view value(reinterpret_cast<const char*>(bytes_.data()), length);
    bytes_ = bytes_.subspan(length);
    return value;
  }

  /// The report ends inside a record.
  struct Cut {};

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/printable.hpp"

#include <fmt/core.h>

#include <array>
#include <iterator>

#include "src/base/escaped.hpp"

namespace muster::inspect {

std::string printable(std::string_view text) {
  return escaped(text, "\\");
}

std::string printable_json(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  while (!json.empty()) {
    const Character character = first_character(json);
    // Line breaks between values are the text's own: inside strings they are escaped already.
    if (!is_dangerous(character.code) || character.code == '\n') {
      out += json.substr(0, character.bytes);
    } else if (character.code < 0x10000) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(character.code));
    } else {
      const auto above = static_cast<unsigned>(character.code) - 0x10000U;
      fmt::format_to(std::back_inserter(out), "\\u{:04x}\\u{:04x}", 0xd800 + (above >> 10), 0xdc00 + (above & 0x3ff));
    }
    json.remove_prefix(character.bytes);
  }
  return out;
}

std::size_t columns(std::string_view text) noexcept {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0U) != 0x80 ? 1 : 0;
  return count;
}

std::string shorten(std::string_view text, std::size_t width) {
  const std::size_t length = columns(text);
  if (length <= width) return std::string(text);
  const std::size_t kept = width < 5 ? 2 : width - 3;
  // The end tells more than the beginning: "...layers.11.mlp.weight".
  const std::size_t head = kept / 3;
  const std::size_t tail = kept - head;
  const auto byte_of = [&text](std::size_t column) {
    std::size_t at = 0;
    for (; at < text.size(); ++at) {
      if ((static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80) continue;
      if (column-- == 0) break;
    }
    return at;
  };
  return fmt::format("{}...{}", text.substr(0, byte_of(head)), text.substr(byte_of(length - tail)));
}

std::string human_bytes(std::uint64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  constexpr std::array<const char*, 6> units = {"kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  // 999,950 and more would be printed as 1000.0.
  while (value >= 999.95 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, units[unit]);
}

}  // namespace muster::inspect

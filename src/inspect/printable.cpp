// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/printable.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

namespace muster::inspect {
namespace {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 1;
  bool is_valid = false;
};

// The character at the front; one byte that is not valid where there is none.
Character decode(std::string_view text) noexcept {
  const auto byte = [&text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {first, 1, true};
  const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return {first, 1, false};
  char32_t code = first & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return {first, 1, false};
    code = (code << 6) | (byte(i) & 0x3fU);
  }
  constexpr std::array<char32_t, 5> least = {0, 0, 0x80, 0x800, 0x10000};
  if (code < least[bytes] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return {first, 1, false};
  return {code, bytes, true};
}

bool is_dangerous(char32_t code) noexcept {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xad || code == 0x61c ||
         (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) || code >= 0xe0000;
}

}  // namespace

std::string printable(std::string_view text) {
  // Nearly all names are plain: they are looked through once and copied whole.
  if (std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~' && c != '\\'; }))
    return std::string(text);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character character = decode(text);
    if (!character.is_valid || (is_dangerous(character.code) && character.code < 0x80)) {
      if (character.code == '\n')
        out += "\\n";
      else if (character.code == '\t')
        out += "\\t";
      else
        fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned>(character.code));
    } else if (is_dangerous(character.code)) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(character.code));
    } else {
      if (character.code == '\\') out += '\\';
      out += text.substr(0, character.bytes);
    }
    text.remove_prefix(character.bytes);
  }
  return out;
}

std::string printable_json(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  while (!json.empty()) {
    const Character character = decode(json);
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

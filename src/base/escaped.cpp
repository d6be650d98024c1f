// SPDX-License-Identifier: Apache-2.0
#include "src/base/escaped.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace muster {

Character first_character(std::string_view text) noexcept {
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

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    // Most text is ASCII, so it is checked eight bytes at a time.
    constexpr std::uint64_t high_bits = 0x8080808080808080;
    for (std::uint64_t eight = 0; text.size() >= sizeof eight; text.remove_prefix(sizeof eight)) {
      std::memcpy(&eight, text.data(), sizeof eight);
      if ((eight & high_bits) != 0) break;
    }
    const auto* const other = std::ranges::find_if(text, [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
    text.remove_prefix(static_cast<std::size_t>(other - text.begin()));
    if (text.empty()) return true;
    const Character character = first_character(text);
    if (!character.is_valid) return false;
    text.remove_prefix(character.bytes);
  }
  return true;
}

bool is_dangerous(char32_t code) noexcept {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xad || code == 0x61c ||
         (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) || code >= 0xe0000;
}

std::string escaped(std::string_view text, std::string_view also) {
  const auto is_also = [also](char c) { return also.find(c) != std::string_view::npos; };
  // Nearly all text is plain: it is scanned once and copied in one piece.
  if (std::all_of(text.begin(), text.end(), [&](char c) { return c >= ' ' && c <= '~' && !is_also(c); }))
    return std::string(text);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character character = first_character(text);
    if (character.is_valid && !is_dangerous(character.code)) {
      if (is_also(text.front())) out += '\\';
      out += text.substr(0, character.bytes);
    } else if (character.code == '\n') {
      out += "\\n";
    } else if (character.code == '\t') {
      out += "\\t";
    } else {
      const bool is_byte = !character.is_valid || character.code < 0x80;
      std::array<char, 16> digits{};
      std::snprintf(digits.data(), digits.size(), is_byte ? "\\x%02x" : "\\u%04x",
                    static_cast<unsigned>(character.code));
      out += digits.data();
    }
    text.remove_prefix(character.bytes);
  }
  return out;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 200;
  constexpr std::string_view also = "\"\\";
  const std::string inside = text.size() <= longest ? escaped(text, also)
                                                    : escaped(text.substr(0, longest / 2), also) + "..." +
                                                          escaped(text.substr(text.size() - longest / 2), also);
  return "\"" + inside + "\"";
}

Error file_error(ErrorKind kind, std::string_view doing, const std::string& path, std::string_view message,
                 int os_error) {
  return {kind,
          in_quotes(path) + ": " + (doing.empty() ? "" : std::string(doing) + ": ") + std::string(message),
          {.path = path, .os_error = os_error}};
}

}  // namespace muster

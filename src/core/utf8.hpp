// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether bytes are text.

#include <cstdint>
#include <cstring>
#include <string_view>

namespace muster::core {

/// Well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) noexcept {
  const auto* at = reinterpret_cast<const unsigned char*>(text.data());
  const auto* const end = at + text.size();
  while (at != end) {
    // Most text is ASCII: eight bytes at a time.
    while (end - at >= 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, at, 8);
      if ((word & 0x8080808080808080ULL) != 0) break;
      at += 8;
    }
    if (at == end) break;
    const unsigned char first = *at++;
    if (first < 0x80) continue;
    int more = 0;
    unsigned char low = 0x80;
    unsigned char high = 0xbf;
    if (first >= 0xc2 && first <= 0xdf) {
      more = 1;
    } else if (first >= 0xe0 && first <= 0xef) {
      more = 2;
      if (first == 0xe0) low = 0xa0;
      if (first == 0xed) high = 0x9f;
    } else if (first >= 0xf0 && first <= 0xf4) {
      more = 3;
      if (first == 0xf0) low = 0x90;
      if (first == 0xf4) high = 0x8f;
    } else {
      return false;
    }
    for (; more != 0; --more, ++at) {
      if (at == end || *at < low || *at > high) return false;
      low = 0x80;
      high = 0xbf;
    }
  }
  return true;
}

}  // namespace muster::core

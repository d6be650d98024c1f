// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text in the fixed arrays of records that processes share: cut if it is too long, always ended by a zero.

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

namespace muster {

template <std::size_t N>
void put_text(std::array<char, N>& target, std::string_view text) noexcept {
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(target.data(), text.data(), length);
  target[length] = 0;
}

/// Ends at the array's end where whoever wrote it left the zero out.
template <std::size_t N>
std::string get_text(const std::array<char, N>& source) {
  return {source.data(), ::strnlen(source.data(), N)};
}

}  // namespace muster

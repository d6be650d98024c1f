// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text and errors in fixed arrays of records that processes share. Text that is too long is truncated.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "muster/error.hpp"

namespace muster {

/// Copies the text, truncated if necessary, with a terminating zero.
template <std::size_t N>
void put_text(std::array<char, N>& target, std::string_view text) noexcept {
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(target.data(), text.data(), length);
  target[length] = 0;
}

/// Returns the text up to its zero, or up to the end of the array if the writer has left out the zero.
template <std::size_t N>
std::string get_text(const std::array<char, N>& source) {
  return {source.data(), ::strnlen(source.data(), N)};
}

template <std::size_t TextBytes>
struct WrittenError {
  std::uint32_t kind = 0;
  std::int32_t rank = -1;  // -1: unknown
  std::int32_t os_error = 0;
  std::int64_t pid = -1;
  std::array<char, 72> host{};
  std::array<char, 256> path{};
  std::array<char, TextBytes> text{};

  void put(const Error& error) noexcept {
    kind = static_cast<std::uint32_t>(error.kind());
    rank = error.rank().value_or(-1);
    os_error = error.os_error();
    pid = error.pid().value_or(-1);
    put_text(host, error.host());
    put_text(path, error.path());
    put_text(text, error.what());
  }
  [[nodiscard]] Error get() const {
    ErrorDetails details{.host = get_text(host), .path = get_text(path), .os_error = os_error};
    if (rank >= 0) details.rank = rank;
    if (pid >= 0) details.pid = pid;
    return Error(static_cast<ErrorKind>(kind), get_text(text), std::move(details));
  }
};

}  // namespace muster

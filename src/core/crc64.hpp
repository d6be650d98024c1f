// SPDX-License-Identifier: Apache-2.0
#pragma once
// CRC-64/XZ (ECMA-182, reflected, initial value and final XOR all ones), and its linear part. The remainder of bytes
// is linear: the remainder of a tensor is the XOR of the remainders of its runs, each shifted by the number of bytes
// that follow the run. So runs may be read in any order and by different processes. A CRC detects accidents, not
// attacks.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace muster {

/// Returns the CRC-64/XZ of bytes: 995dc9bbdf1939fa for "123456789".
std::uint64_t crc64(std::span<const std::byte> bytes) noexcept;

/// Returns the remainder of bytes: their CRC with an initial value and a final XOR of zero.
std::uint64_t crc64_remainder(std::span<const std::byte> bytes) noexcept;

/// Returns the remainder of the same bytes with `bytes` zero bytes behind them.
std::uint64_t crc64_shifted(std::uint64_t remainder, std::uint64_t bytes) noexcept;

/// Returns the CRC-64/XZ of `bytes` bytes with this remainder.
std::uint64_t crc64_of_remainder(std::uint64_t remainder, std::uint64_t bytes) noexcept;

/// Returns the CRC-64/XZ of A followed by B, from those of A and of B.
inline std::uint64_t crc64_joined(std::uint64_t a, std::uint64_t b, std::uint64_t bytes_of_b) noexcept {
  return crc64_shifted(a, bytes_of_b) ^ b;
}

/// Shifts many remainders by the same number of bytes, in a few nanoseconds each. Has tables of 16 KiB.
class Crc64Shift {
 public:
  explicit Crc64Shift(std::uint64_t bytes) noexcept;
  std::uint64_t operator()(std::uint64_t remainder) const noexcept {
    std::uint64_t shifted = 0;
    for (std::size_t byte = 0; byte < tables_.size(); ++byte)
      shifted ^= tables_[byte][static_cast<std::uint8_t>(remainder >> (8 * byte))];
    return shifted;
  }

 private:
  std::array<std::array<std::uint64_t, 256>, 8> tables_;  // by byte of the remainder, and its value
};

}  // namespace muster

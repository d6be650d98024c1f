// SPDX-License-Identifier: Apache-2.0
// Remainders are polynomials over GF(2) modulo the CRC's polynomial. They are reflected: the highest bit is the
// coefficient of 1, and each lower bit is that of the next power of x.

#include "src/core/crc64.hpp"

#include <isa-l/crc64.h>

#include <array>

namespace muster {
namespace {

constexpr std::uint64_t polynomial = 0xc96c5795d7870f42;
constexpr std::uint64_t one = std::uint64_t{1} << 63;

constexpr std::uint64_t times_x(std::uint64_t a) noexcept {
  return (a >> 1) ^ ((a & 1) != 0 ? polynomial : 0);
}

constexpr std::uint64_t product(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t sum = 0;
  for (; a != 0; a <<= 1, b = times_x(b)) sum ^= (a & one) != 0 ? b : 0;
  return sum;
}

/// Element i shifts by 2 to the power of i bytes.
constexpr auto powers = [] {
  std::array<std::uint64_t, 64> all{};
  all[0] = one >> 8;  // x to the power of 8: one byte
  for (std::size_t i = 1; i < all.size(); ++i) all[i] = product(all[i - 1], all[i - 1]);
  return all;
}();

std::uint64_t power(std::uint64_t bytes) noexcept {
  std::uint64_t factor = one;
  for (std::size_t i = 0; bytes != 0; ++i, bytes >>= 1)
    if ((bytes & 1) != 0) factor = product(factor, powers[i]);
  return factor;
}

/// ISA-L inverts the initial value and the result.
std::uint64_t continued(std::uint64_t crc, std::span<const std::byte> bytes) noexcept {
  return bytes.empty() ? crc : crc64_ecma_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

}  // namespace

std::uint64_t crc64(std::span<const std::byte> bytes) noexcept {
  return continued(0, bytes);
}

std::uint64_t crc64_remainder(std::span<const std::byte> bytes) noexcept {
  return ~continued(~std::uint64_t{0}, bytes);
}

std::uint64_t crc64_shifted(std::uint64_t remainder, std::uint64_t bytes) noexcept {
  return product(remainder, power(bytes));
}

std::uint64_t crc64_of_remainder(std::uint64_t remainder, std::uint64_t bytes) noexcept {
  return ~(crc64_shifted(~std::uint64_t{0}, bytes) ^ remainder);
}

Crc64Shift::Crc64Shift(std::uint64_t bytes) noexcept {
  // The product of `factor` with x to the power of n, from the highest bit of a remainder on.
  std::uint64_t factor = power(bytes);
  for (std::size_t byte = tables_.size(); byte-- > 0;) {
    std::array<std::uint64_t, 256>& table = tables_[byte];
    table[0] = 0;
    for (std::size_t bit = 128; bit != 0; bit /= 2, factor = times_x(factor)) table[bit] = factor;
    for (std::size_t value = 1; value < table.size(); ++value)
      table[value] = table[value & (value - 1)] ^ table[value & -value];
  }
}

}  // namespace muster

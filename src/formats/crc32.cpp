// SPDX-License-Identifier: Apache-2.0
#include "src/formats/crc32.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace muster::formats {
namespace {

constexpr std::size_t at_once = 8;

/// tables[k][b]: what a byte b becomes with k zero bytes behind it.
constexpr auto make_tables() {
  std::array<std::array<std::uint32_t, 256>, at_once> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1U) ^ ((value & 1U) != 0 ? 0xedb88320U : 0U);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < at_once; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8U) ^ tables[0][tables[k - 1][byte] & 0xffU];
  return tables;
}
constexpr auto tables = make_tables();

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  static_assert(std::endian::native == std::endian::little);
  std::uint32_t value = ~before;
  for (; bytes.size() >= at_once; bytes = bytes.subspan(at_once)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), at_once);
    word ^= value;
    value = 0;
    for (std::size_t k = 0; k < at_once; ++k) value ^= tables[at_once - 1 - k][(word >> (8 * k)) & 0xffU];
  }
  for (const std::byte byte : bytes)
    value = (value >> 8U) ^ tables[0][(value ^ std::to_integer<std::uint32_t>(byte)) & 0xffU];
  return ~value;
}

}  // namespace muster::formats

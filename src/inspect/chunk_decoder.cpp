// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/chunk_decoder.hpp"

#include <fmt/core.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <string>

#include "muster/error.hpp"
#include "src/hdf5/foreign_report.hpp"
#include "src/statefile/chunk_codec.hpp"

namespace muster::inspect {
namespace {

constexpr std::size_t checksum_bytes = 4;

[[noreturn]] void throw_corrupt(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

bool is_compression(std::uint64_t id) noexcept {
  return id == hdf5::filter_deflate || id == hdf5::filter_zstd;
}

bool is_applied(std::uint32_t mask, std::size_t filter) noexcept {
  return (mask >> filter & 1U) == 0;
}

std::vector<std::byte> inflate_exactly(std::span<const std::byte> stored, std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  z_stream stream{};
  if (::inflateInit(&stream) != Z_OK) throw Error(ErrorKind::no_space, "starting zlib: no memory");
  // Chunks are at most 64 MiB (the caller's limit), so all numbers fit.
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(stored.data()));
  stream.avail_in = static_cast<uInt>(stored.size());
  // zlib wants a place even where nothing may come out.
  Bytef nowhere = 0;
  stream.next_out = out.empty() ? &nowhere : reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const int result = ::inflate(&stream, Z_FINISH);
  const std::size_t made = stream.total_out;
  ::inflateEnd(&stream);
  if (result == Z_STREAM_END && made == bytes) return out;
  if (result == Z_STREAM_END) throw_corrupt(fmt::format("its zlib stream has {} bytes where {} belong", made, bytes));
  if (result == Z_BUF_ERROR || result == Z_OK)
    throw_corrupt(made == bytes ? fmt::format("its zlib stream has more than the {} bytes that belong there", bytes)
                                : fmt::format("its zlib stream is cut off after {} of {} bytes", made, bytes));
  throw_corrupt(fmt::format("its zlib stream is damaged after {} of {} bytes", made, bytes));
}

std::vector<std::byte> unpack_zstd_exactly(std::span<const std::byte> stored, std::size_t bytes) {
  std::vector<std::byte> out(bytes);
  const std::size_t made = ::ZSTD_decompress(out.data(), out.size(), stored.data(), stored.size());
  if (::ZSTD_isError(made) != 0)
    throw_corrupt(fmt::format("its zstd frame does not decode to {} bytes: {}", bytes, ::ZSTD_getErrorName(made)));
  if (made != bytes) throw_corrupt(fmt::format("its zstd frame has {} bytes where {} belong", made, bytes));
  return out;
}

/// What is no whole element stands at the end as it is.
std::vector<std::byte> unshuffled(const std::vector<std::byte>& from, std::uint64_t item_bytes) {
  if (item_bytes <= 1 || item_bytes > from.size()) return from;
  const auto item = static_cast<std::size_t>(item_bytes);
  const std::size_t whole = from.size() / item * item;
  std::vector<std::byte> to(from.size());
  const std::size_t count = whole / item;
  if (item == 2 || item == 4 || item == 8) {
    statefile::unshuffle(std::span(from).first(whole), item, count, to.data());
  } else {
    // Of no dtype that is shown, but of a parameter that a file may have.
    for (std::size_t byte = 0; byte < item; ++byte)
      for (std::size_t i = 0; i < count; ++i) to[i * item + byte] = from[byte * count + i];
  }
  std::copy(from.begin() + static_cast<std::ptrdiff_t>(whole), from.end(),
            to.begin() + static_cast<std::ptrdiff_t>(whole));
  return to;
}

void check_and_drop_checksum(std::vector<std::byte>& bytes) {
  if (bytes.size() < checksum_bytes) throw_corrupt("it is too short for its checksum");
  std::uint32_t stored = 0;
  for (std::size_t i = 0; i < checksum_bytes; ++i)
    stored |= std::to_integer<std::uint32_t>(bytes[bytes.size() - checksum_bytes + i]) << (8 * i);
  bytes.resize(bytes.size() - checksum_bytes);
  const std::uint32_t sum = fletcher32(bytes);
  // Early versions of HDF5 on little-endian machines swapped the bytes of both halves.
  const std::uint32_t swapped = ((sum & 0x00ff00ffU) << 8U) | ((sum & 0xff00ff00U) >> 8U);
  if (stored != sum && stored != swapped)
    throw_corrupt(fmt::format("its checksum is {:08x}, that of its bytes {:08x}", stored, sum));
}

}  // namespace

bool can_decode(std::span<const ChunkFilter> filters) noexcept {
  std::size_t compressions = 0;
  for (const ChunkFilter& filter : filters) {
    if (is_compression(filter.id))
      ++compressions;
    else if (filter.id != hdf5::filter_shuffle && filter.id != hdf5::filter_fletcher32)
      return false;
  }
  return compressions <= 1;
}

std::vector<std::byte> decode_chunk(std::vector<std::byte> stored, std::span<const ChunkFilter> filters,
                                    std::uint32_t filter_mask, std::size_t decoded_bytes) {
  // How large it was before each filter: checksums add to it, and there is no second compression.
  std::vector<std::size_t> before(filters.size());
  std::size_t size = decoded_bytes;
  for (std::size_t i = 0; i < filters.size(); ++i) {
    before[i] = size;
    if (is_applied(filter_mask, i) && filters[i].id == hdf5::filter_fletcher32) size += checksum_bytes;
  }
  std::vector<std::byte> bytes = std::move(stored);
  for (std::size_t i = filters.size(); i-- > 0;) {
    if (!is_applied(filter_mask, i)) continue;
    const std::uint64_t id = filters[i].id;
    if (id == hdf5::filter_deflate)
      bytes = inflate_exactly(bytes, before[i]);
    else if (id == hdf5::filter_zstd)
      bytes = unpack_zstd_exactly(bytes, before[i]);
    else if (id == hdf5::filter_shuffle)
      bytes = unshuffled(bytes, filters[i].parameter);
    else if (id == hdf5::filter_fletcher32)
      check_and_drop_checksum(bytes);
    else
      throw Error(ErrorKind::unsupported, fmt::format("it went through the filter {}", id));
  }
  if (bytes.size() != decoded_bytes)
    throw_corrupt(fmt::format("it has {} bytes where {} belong", bytes.size(), decoded_bytes));
  return bytes;
}

std::uint32_t fletcher32(std::span<const std::byte> bytes) noexcept {
  // Sums of ones' complement: carries are added back, seldom enough that 64 bits never overflow.
  constexpr std::size_t words_between = std::size_t{1} << 16;
  const auto fold = [](std::uint64_t sum) {
    while (sum >> 16U != 0) sum = (sum & 0xffffU) + (sum >> 16U);
    return sum;
  };
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::size_t at = 0;
  while (at + 1 < bytes.size()) {
    const std::size_t end = std::min(bytes.size() / 2 * 2, at + 2 * words_between);
    for (; at < end; at += 2) {
      low += std::to_integer<std::uint64_t>(bytes[at]) << 8U | std::to_integer<std::uint64_t>(bytes[at + 1]);
      high += low;
    }
    low = fold(low);
    high = fold(high);
  }
  if (at < bytes.size()) {
    low += std::to_integer<std::uint64_t>(bytes[at]) << 8U;
    high += low;
  }
  return static_cast<std::uint32_t>(fold(high) << 16U | fold(low));
}

}  // namespace muster::inspect

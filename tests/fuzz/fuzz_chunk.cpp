// SPDX-License-Identifier: Apache-2.0
// Any bytes as a stored chunk. They are not decoded, or yield exactly the expected number of bytes. A part of the chunk
// then equals that part of the whole, and encoding and decoding restores it.
//
// The first byte has the element's size and whether the chunk is raw. Two bytes each follow for the size of the chunk
// and of the part.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/statefile/chunk_codec.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster::statefile;
using muster::test::require;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // One decoder for many chunks, as in readers.
  static ChunkDecoder decoder;
  static ChunkEncoder encoder(1);
  if (size < 5) return 0;
  const std::size_t item = std::size_t{1} << (data[0] & 3U);
  const bool is_raw = (data[0] & 4U) != 0;
  const std::size_t chunk_bytes = (data[1] + 256U * data[2]) * item;
  const std::size_t wanted = std::min<std::size_t>(data[3] + 256U * data[4], chunk_bytes);
  if (chunk_bytes == 0) return 0;
  const auto stored = std::as_bytes(std::span(data, size)).subspan(5);
  std::vector<std::byte> part(wanted);
  std::vector<std::byte> whole(chunk_bytes);
  const bool is_part = decoder.decode(stored, is_raw, chunk_bytes, item, part);
  const bool is_whole = decoder.decode(stored, is_raw, chunk_bytes, item, whole);
  require(is_part == is_whole);
  if (!is_whole) return 0;
  require(std::ranges::equal(part, std::span(whole).first(wanted)));
  const std::vector<std::byte> before = whole;
  const ChunkEncoder::Encoded encoded = encoder.encode(before, chunk_bytes, item);
  require(decoder.decode(encoded.bytes, encoded.is_raw, chunk_bytes, item, whole) && whole == before);
  return 0;
}

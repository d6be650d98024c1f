// SPDX-License-Identifier: Apache-2.0
// A stream that is read forwards, backwards, and farther back than its buffer.

#include "src/formats/zstd_stream.hpp"

#include <doctest/doctest.h>
#include <zstd.h>

#include <cstring>
#include <string>

#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

std::string zstd_of(std::string_view bytes) {
  std::string out(ZSTD_compressBound(bytes.size()), ' ');
  out.resize(ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 1));
  return out;
}

formats::ReadAt reader_of(const std::string& text) {
  return [&text](std::uint64_t at, std::span<std::byte> target) {
    REQUIRE(at + target.size() <= text.size());
    std::memcpy(target.data(), text.data() + at, target.size());
  };
}

std::string read(formats::ZstdStream& stream, std::uint64_t at, std::size_t bytes) {
  std::string out(bytes, ' ');
  stream.read(at, std::as_writable_bytes(std::span(out)));
  return out;
}

}  // namespace

TEST_CASE("bytes are found at every requested offset") {
  constexpr std::size_t size = 5 * formats::ZstdStream::most_kept / 2;
  std::string text(size, ' ');
  for (std::size_t i = 0; i + 8 <= size; i += 8) std::memcpy(text.data() + i, &i, 8);
  // Two frames in succession.
  const std::string packed =
      zstd_of(std::string_view(text).substr(0, 1000)) + zstd_of(std::string_view(text).substr(1000));
  formats::ZstdStream stream(reader_of(packed), packed.size(), size);
  CHECK(stream.size() == size);
  constexpr std::size_t places[] = {size - 100, 0, 990, 8 << 20, 3, size / 2, size - 1};
  for (const std::size_t at : places) {
    const std::size_t bytes = std::min<std::size_t>(size - at, 3 << 20);
    CHECK((read(stream, at, bytes) == text.substr(at, bytes)));
  }
  CHECK(has(words_of(ErrorKind::corrupt, [&] { read(stream, size - 1, 2); }), "ends at"));
  formats::ZstdStream longer(reader_of(packed), packed.size(), size - 1);
  CHECK(has(words_of(ErrorKind::corrupt, [&] { longer.size(); }), "more than"));
  formats::ZstdStream shorter(reader_of(packed), packed.size() - 1, size);
  CHECK(has(words_of(ErrorKind::corrupt, [&] { shorter.size(); }), "truncated"));
}

// SPDX-License-Identifier: Apache-2.0
// Any bytes as a part of a version of weights. The first byte selects the part:
//
//  i  the index: it is refused, or written again without a loss
//  r  the record of a local copy: likewise
//  x, o  the changes of a tensor (xor, overwrite); two bytes have its size. Whatever the pieces, the result is the same
//  e  new and old bytes of a tensor, one half each: what is encoded is decoded
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/versions/delta_codec.hpp"
#include "src/versions/local_copy.hpp"
#include "src/versions/version_index.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using namespace muster::versions;
using muster::test::may_fail;
using muster::test::require;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t version = 7;

void read_index(std::string_view text) {
  may_fail({ErrorKind::corrupt, ErrorKind::unsupported, ErrorKind::version}, [&] {
    VersionIndex index = parse_version_index(text, "index.json", version);
    const VersionIndex again = parse_version_index(version_index_text(index), "again.json", version);
    require(again.kind == index.kind && again.weights == index.weights && again.encoding == index.encoding &&
            again.base_version == index.base_version && again.checksums == index.checksums);
    require(again.own.has_value() == index.own.has_value());
    if (index.own) require(again.own->files == index.own->files && again.own->after == index.own->after);
  });
}

void read_record(std::string_view text) {
  may_fail({ErrorKind::corrupt, ErrorKind::version}, [&] {
    const CopyRecord record = parse_record(text);
    const CopyRecord again = parse_record(record_text(record));
    require(again.version == record.version && again.state == record.state && again.boot == record.boot &&
            again.tensors.size() == record.tensors.size() && again.files.size() == record.files.size());
  });
}

/// Returns the tensor after the changes; nullopt if they are damaged.
std::optional<Bytes> decoded(DeltaEncoding encoding, std::span<const std::byte> frame, Bytes tensor,
                             std::size_t piece) {
  const auto read = [&](std::uint64_t at, std::span<std::byte> target) {
    require(at <= frame.size() && target.size() <= frame.size() - at);
    std::copy_n(frame.begin() + static_cast<std::ptrdiff_t>(at), target.size(), target.begin());
  };
  std::optional<Bytes> result;
  may_fail({ErrorKind::corrupt}, [&] {
    DeltaDecoder decoder(encoding, read, frame.size(), tensor.size());
    for (std::size_t at = 0; at < tensor.size(); at += piece)
      decoder.apply(std::span(tensor).subspan(at, std::min(piece, tensor.size() - at)));
    decoder.end();
    result = std::move(tensor);
  });
  return result;
}

void encode(std::span<const std::byte> bytes) {
  const std::size_t size = bytes.size() / 2;
  const Bytes old_bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
  const Bytes new_bytes(bytes.begin() + static_cast<std::ptrdiff_t>(size),
                        bytes.begin() + static_cast<std::ptrdiff_t>(2 * size));
  std::uint64_t changed = 0;
  for (std::size_t i = 0; i < size; ++i) changed += old_bytes[i] != new_bytes[i] ? 1 : 0;
  for (const DeltaEncoding encoding : {DeltaEncoding::exclusive_or, DeltaEncoding::overwrite}) {
    Bytes frame;
    DeltaEncoder encoder(encoding,
                         [&](std::span<const std::byte> part) { frame.insert(frame.end(), part.begin(), part.end()); });
    encoder.begin(size, 1);
    Bytes work = old_bytes;
    const std::size_t half = size / 2;
    encoder.add(std::span(new_bytes).first(half), std::span(work).first(half));
    encoder.add(std::span(new_bytes).subspan(half), std::span(work).subspan(half));
    const bool is_changed = encoder.end();
    require(is_changed == (changed != 0) && encoder.changed_elements() == changed && is_changed != frame.empty());
    if (is_changed) require(decoded(encoding, frame, old_bytes, 7) == new_bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto rest = std::as_bytes(std::span(data, size)).subspan(1);
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'i') read_index(text);
  if (data[0] == 'r') read_record(text);
  if (data[0] == 'e') encode(rest);
  if ((data[0] == 'x' || data[0] == 'o') && rest.size() >= 2) {
    const Bytes tensor(data[1] + 256U * data[2], std::byte{0x5a});
    const DeltaEncoding encoding = data[0] == 'x' ? DeltaEncoding::exclusive_or : DeltaEncoding::overwrite;
    require(decoded(encoding, rest.subspan(2), tensor, 1000) == decoded(encoding, rest.subspan(2), tensor, 64 << 10));
  }
  return 0;
}

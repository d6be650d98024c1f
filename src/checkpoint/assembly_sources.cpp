// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly_sources.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "muster/error.hpp"

namespace muster {
namespace {

constexpr std::uint64_t read_at_once = 1 << 20;
// Longer rows are worth a system call each.
constexpr std::uint64_t long_row = 128 << 10;

[[noreturn]] void refuse() {
  throw Error(ErrorKind::corrupt, "the work of a process is garbled");
}

/// The bytes from the first row's begin to the last one's end, which must be within `size` from `begin` on.
void check_extent(std::uint64_t begin, std::uint64_t stride, std::uint64_t bytes, std::uint64_t rows,
                  std::uint64_t size) {
  std::uint64_t length = 0;
  if (rows == 0 || __builtin_mul_overflow(rows - 1, stride, &length) ||
      __builtin_add_overflow(length, bytes, &length) || begin > size || length > size - begin)
    refuse();
}

}  // namespace

void read_rows(const AssemblySource& source, const RowCopy& rows, std::byte* target) {
  if (rows.from_stride == rows.bytes && rows.to_stride == rows.bytes) {
    source.read(rows.from, {target, rows.count * rows.bytes});
  } else if (rows.bytes >= long_row || rows.count == 1) {
    for (std::uint64_t row = 0; row < rows.count; ++row)
      source.read(rows.from + row * rows.from_stride, {target + row * rows.to_stride, rows.bytes});
  } else {
    const std::uint64_t at_once =
        std::clamp<std::uint64_t>(read_at_once / std::max<std::uint64_t>(rows.from_stride, 1), 1, rows.count);
    const std::uint64_t most = (at_once - 1) * rows.from_stride + rows.bytes;
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(most);
    for (std::uint64_t row = 0; row < rows.count; row += at_once) {
      const std::uint64_t now = std::min(at_once, rows.count - row);
      source.read(rows.from + row * rows.from_stride, {memory.get(), (now - 1) * rows.from_stride + rows.bytes});
      for (std::uint64_t i = 0; i < now; ++i)
        std::memcpy(target + (row + i) * rows.to_stride, memory.get() + i * rows.from_stride, rows.bytes);
    }
  }
}

const AssemblySource& SourceReader::source(std::uint32_t tensor) const {
  if (tensor >= sources_.size()) refuse();
  return sources_[tensor];
}

void SourceReader::copy(const CopyStep& copy, std::span<std::byte> window) const {
  const AssemblySource& from = source(copy.tensor);
  check_extent(copy.from, copy.from_stride, copy.bytes, copy.rows, from.bytes);
  check_extent(copy.to, copy.to_stride, copy.bytes, copy.rows, window.size());
  read_rows(from, {copy.from, copy.from_stride, copy.to_stride, copy.bytes, copy.rows}, window.data() + copy.to);
}

TensorHash SourceReader::hash(std::uint32_t set, const CopyStep& part) const {
  const AssemblySource& source = this->source(part.tensor);
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_128bits_reset(state.get());
  const std::uint64_t end = part.bytes == 0 ? source.bytes : part.from + part.bytes;
  if (part.from > end || end > source.bytes) refuse();
  std::vector<std::byte> memory(std::min(end - part.from, read_at_once));
  for (std::uint64_t at = part.from; at < end; at += read_at_once) {
    const std::span<std::byte> piece = std::span(memory).first(std::min(end - at, read_at_once));
    source.read(at, piece);
    XXH3_128bits_update(state.get(), piece.data(), piece.size());
  }
  const XXH128_hash_t digest = XXH3_128bits_digest(state.get());
  return {set, part.tensor, digest.low64, digest.high64};
}

}  // namespace muster

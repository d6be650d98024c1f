// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly_sources.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "muster/error.hpp"
#include "src/os/file.hpp"

namespace muster {
namespace {

constexpr std::uint64_t hashed_at_once = 8 << 20;

[[noreturn]] void refuse() {
  throw Error(ErrorKind::corrupt, "the work of a process is garbled");
}

}  // namespace

SourceReader::Use::~Use() {
  if (is_mapped_) os::forget_mapped(bytes_);
}

const AssemblySource& SourceReader::source(std::uint32_t tensor) const {
  if (tensor >= sources_.size()) refuse();
  return sources_[tensor];
}

SourceReader::Use SourceReader::use(const AssemblySource& source, std::uint64_t begin, std::uint64_t bytes) const {
  const std::uint64_t size = source.nbytes();
  if (begin > size || bytes > size - begin) refuse();
  if (source.read) {
    std::vector<std::byte> part(bytes);
    source.read(begin, part);
    return Use(std::move(part));
  }
  const std::span<const std::byte> all(source.tensor.view().host_data(), size);
  const std::span<const std::byte> part = all.subspan(begin, bytes);
  if (!source.file.empty()) os::populate_mapped(part, source.file);
  if (source.check) source.check->check(all, begin, bytes);
  return Use(part, !source.file.empty());
}

SourceReader::Use SourceReader::use(const CopyStep& copy) const {
  if (copy.rows == 0) refuse();
  std::uint64_t length = 0;
  if (__builtin_mul_overflow(copy.rows - 1, copy.from_stride, &length) ||
      __builtin_add_overflow(length, copy.bytes, &length))
    refuse();
  return use(source(copy.tensor), copy.from, length);
}

void SourceReader::copy(const CopyStep& copy, std::span<std::byte> window) const {
  const Use part = use(copy);
  std::uint64_t length = 0;
  if (__builtin_mul_overflow(copy.rows - 1, copy.to_stride, &length) ||
      __builtin_add_overflow(length, copy.bytes, &length) || copy.to > window.size() ||
      length > window.size() - copy.to)
    refuse();
  const std::byte* from = part.bytes().data();
  std::byte* to = window.data() + copy.to;
  for (std::uint64_t row = 0; row < copy.rows; ++row, from += copy.from_stride, to += copy.to_stride)
    std::memcpy(to, from, copy.bytes);
}

TensorHash SourceReader::hash(std::uint32_t set, const CopyStep& part) const {
  const AssemblySource& source = this->source(part.tensor);
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_128bits_reset(state.get());
  const std::uint64_t end = part.bytes == 0 ? source.nbytes() : part.from + part.bytes;
  for (std::uint64_t at = part.from; at < end; at += hashed_at_once) {
    const Use piece = use(source, at, std::min(end - at, hashed_at_once));
    XXH3_128bits_update(state.get(), piece.bytes().data(), piece.bytes().size());
  }
  const XXH128_hash_t digest = XXH3_128bits_digest(state.get());
  return {set, part.tensor, digest.low64, digest.high64};
}

}  // namespace muster

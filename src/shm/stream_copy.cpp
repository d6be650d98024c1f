// SPDX-License-Identifier: Apache-2.0
#include "src/shm/stream_copy.hpp"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace muster::shm {
namespace {

// Smaller blocks are likely to be read again while they are still in a cache.
constexpr std::size_t streaming_from = 256 * 1024;
// Shorter rows consist mostly of partial cache lines.
constexpr std::size_t row_streaming_from = 256;

#if defined(__x86_64__)

constexpr std::size_t line = 64;

[[gnu::target("avx512f")]] void stream_lines_avx512(std::byte* target, const std::byte* source, std::size_t lines) {
  for (; lines >= 4; lines -= 4, target += 4 * line, source += 4 * line) {
    const __m512i a = _mm512_loadu_si512(source);
    const __m512i b = _mm512_loadu_si512(source + line);
    const __m512i c = _mm512_loadu_si512(source + 2 * line);
    const __m512i d = _mm512_loadu_si512(source + 3 * line);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + line), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 2 * line), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 3 * line), d);
  }
  for (; lines != 0; --lines, target += line, source += line)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
}

[[gnu::target("avx2")]] void stream_lines_avx2(std::byte* target, const std::byte* source, std::size_t lines) {
  for (; lines != 0; --lines, target += line, source += line) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), b);
  }
}

void stream_lines_sse2(std::byte* target, const std::byte* source, std::size_t lines) {
  for (; lines != 0; --lines, target += line, source += line)
    for (std::size_t i = 0; i < line; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
}

StreamLines stream_lines() {
  static const StreamLines best = stream_variants().front();
  return best;
}

void stream(StreamLines lines_of, std::byte* target, const std::byte* source, std::size_t bytes) {
  const std::size_t head = (line - reinterpret_cast<std::uintptr_t>(target) % line) % line;
  if (head != 0) std::memcpy(target, source, head);
  const std::size_t lines = (bytes - head) / line;
  lines_of(target + head, source + head, lines);
  const std::size_t done = head + lines * line;
  if (done != bytes) std::memcpy(target + done, source + done, bytes - done);
}

#endif

}  // namespace

std::vector<StreamLines> stream_variants() {
  std::vector<StreamLines> variants;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) variants.push_back(stream_lines_avx512);
  if (__builtin_cpu_supports("avx2")) variants.push_back(stream_lines_avx2);
  variants.push_back(stream_lines_sse2);
#endif
  return variants;
}

void stream_rows(std::byte* target, std::uint64_t target_stride, const std::byte* source, std::uint64_t source_stride,
                 std::uint64_t bytes, std::uint64_t rows) noexcept {
  if (bytes == target_stride && bytes == source_stride) return stream_copy(target, source, bytes * rows);
  if (bytes == 0) return;
#if defined(__x86_64__)
  if (bytes >= row_streaming_from && bytes * rows >= streaming_from) {
    const StreamLines lines_of = stream_lines();
    for (; rows != 0; --rows, target += target_stride, source += source_stride) stream(lines_of, target, source, bytes);
    return;
  }
#endif
  for (; rows != 0; --rows, target += target_stride, source += source_stride) std::memcpy(target, source, bytes);
}

void stream_copy(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
  if (bytes >= streaming_from)
    stream_piece(target, source, bytes);
  else if (bytes != 0)
    std::memcpy(target, source, bytes);
}

void stream_piece(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  if (bytes >= row_streaming_from) return stream(stream_lines(), target, source, bytes);
#endif
  if (bytes != 0) std::memcpy(target, source, bytes);
}

void publish_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
  std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace muster::shm

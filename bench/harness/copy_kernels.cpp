// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/copy_kernels.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bench {

#if defined(__x86_64__)
namespace {

constexpr std::size_t line = 64;

__attribute__((target("avx"))) void stream_avx(std::byte* target, const std::byte* source, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, target += line, source += line) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), high);
  }
}

__attribute__((target("avx512f"))) void stream_avx512(std::byte* target, const std::byte* source, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, target += line, source += line) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
  }
}

void stream_sse2(std::byte* target, const std::byte* source, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, target += line, source += line) {
    for (std::size_t part = 0; part < line; part += 16) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + part), word);
    }
  }
}

}  // namespace

void copy_nontemporal(std::byte* target, const std::byte* source, std::size_t bytes) {
  const std::size_t lines = bytes / line;
  if (__builtin_cpu_supports("avx512f") != 0) {
    stream_avx512(target, source, lines);
  } else if (__builtin_cpu_supports("avx") != 0) {
    stream_avx(target, source, lines);
  } else {
    stream_sse2(target, source, lines);
  }
  _mm_sfence();
  std::memcpy(target + lines * line, source + lines * line, bytes % line);
}
#else
void copy_nontemporal(std::byte* target, const std::byte* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}
#endif

std::uint64_t sum_words(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  std::uint64_t word = 0;
  for (std::size_t at = 0; at + sizeof word <= bytes.size(); at += sizeof word) {
    std::memcpy(&word, bytes.data() + at, sizeof word);
    sum += word;
  }
  return sum;
}

std::uint64_t touch(std::span<std::byte> bytes, std::uint64_t step) {
  constexpr std::size_t page = 4096;
  std::uint64_t words = 0;
  for (std::size_t at = 0; at + sizeof(std::uint64_t) <= bytes.size(); at += page, ++words) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    word += step;
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
  return words;
}

}  // namespace bench

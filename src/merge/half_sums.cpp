// SPDX-License-Identifier: Apache-2.0
#include "src/merge/half_sums.hpp"

#include <array>
#include <limits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace muster::merge {

#if defined(__x86_64__)
namespace {

// The forms with a mask, because GCC 12 warns of an uninitialised value in the others.
[[gnu::target("avx512f")]] std::size_t add_avx512(std::span<std::byte> target,
                                                  std::span<const std::byte* const> sources) {
  const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
  std::size_t done = 0;
  for (; done + 32 <= target.size(); done += 32) {
    __m512 sum = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sources[0] + done)));
    for (const std::byte* const source : sources.subspan(1))
      sum = _mm512_add_ps(
          sum, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + done))));
    sum = _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target.data() + done),
                        _mm512_maskz_cvtps_ph(0xffff, sum, _MM_FROUND_TO_NEAREST_INT));
  }
  return done;
}

[[gnu::target("avx,f16c")]] std::size_t add_f16c(std::span<std::byte> target,
                                                 std::span<const std::byte* const> sources) {
  const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
  std::size_t done = 0;
  for (; done + 16 <= target.size(); done += 16) {
    __m256 sum = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sources[0] + done)));
    for (const std::byte* const source : sources.subspan(1))
      sum = _mm256_add_ps(sum, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done))));
    sum = _mm256_blendv_ps(sum, nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target.data() + done), _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
  }
  return done;
}

bool has_f16c() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

std::span<const AddHalves> half_sum_variants() noexcept {
#if defined(__x86_64__)
  static constexpr std::array<AddHalves, 2> all = {add_avx512, add_f16c};
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return all;
  if (has_f16c()) return std::span(all).last(1);
#endif
  return {};
}

}  // namespace muster::merge

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Converts blocks of elements to numbers for arithmetic and back. The loops have a fixed length and no branches, so
// that compilers vectorise them.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace muster::merge {

#define MUSTER_INLINE [[gnu::always_inline]] inline

/// Converts a block of N elements to numbers for arithmetic, and back.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  template <std::size_t N>
  MUSTER_INLINE static void widen(const std::byte* from, Value* to) {
    std::memcpy(to, from, N * sizeof(T));
  }
  template <std::size_t N>
  MUSTER_INLINE static void narrow(const Value* from, std::byte* to) {
    std::memcpy(to, from, N * sizeof(T));
  }
};

/// A bool: every stored value except 0 is true, and true is written as 1.
struct Truth : Plain<std::uint8_t> {
  template <std::size_t N>
  MUSTER_INLINE static void widen(const std::byte* from, Value* to) {
    Plain::widen<N>(from, to);
    for (std::size_t i = 0; i < N; ++i) to[i] = to[i] != 0 ? 1 : 0;
  }
};

/// bf16 is the upper half of an f32.
struct Bf16 {
  using Stored = std::uint16_t;
  using Value = float;
  template <std::size_t N>
  MUSTER_INLINE static void widen(const std::byte* from, Value* to) {
    for (std::size_t i = 0; i < N; ++i) {
      Stored stored;
      std::memcpy(&stored, from + i * sizeof stored, sizeof stored);
      to[i] = std::bit_cast<float>(std::uint32_t{stored} << 16);
    }
  }
  template <std::size_t N>
  MUSTER_INLINE static void narrow(const Value* from, std::byte* to) {
    for (std::size_t i = 0; i < N; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(from[i]);
      const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      const std::uint32_t nan = ((bits >> 16) & 0x8000) | 0x7fc0;
      const auto stored = static_cast<Stored>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
      std::memcpy(to + i * sizeof stored, &stored, sizeof stored);
    }
  }
};

/// A float with a narrower exponent than f32, eight at a time. It uses vector types, because compilers vectorise the
/// loops above but not these. `Finite`: no infinity, and one NaN of each sign (f8_e4m3fn). The code does not depend on
/// subnormal f32 numbers, which a program may have disabled.
template <class Bits, int Exponent, int Mantissa, bool Finite>
struct Small {
  using Stored = Bits;
  using Value = float;

  template <std::size_t N>
  MUSTER_INLINE static void widen(const std::byte* from, Value* to) {
    for (std::size_t i = 0; i < N; i += lanes) {
      Narrow narrow;
      std::memcpy(&narrow, from + i * sizeof(Bits), sizeof narrow);
      const Words stored = __builtin_convertvector(narrow, Words);
      const Words value = stored & magnitude;
      const Words normal = (value << shift) + rebias;
      const Floats subnormal =
          reinterpret_cast<Floats>((value << shift) + smallest_normal) - std::bit_cast<float>(smallest_normal);
      Words is_small = reinterpret_cast<Words>(value < (1U << Mantissa));
      Words bits = (reinterpret_cast<Words>(subnormal) & is_small) | (normal & ~is_small);
      const Words is_special = reinterpret_cast<Words>(value >= (Finite ? magnitude : infinity));
      const Words special = Finite ? (value & 0U) | 0x7fc00000U : (value << shift) | 0x7f800000U;
      bits = (special & is_special) | (bits & ~is_special);
      bits |= (stored & sign) << (31 - Exponent - Mantissa);
      std::memcpy(to + i, &bits, sizeof bits);
    }
  }

  template <std::size_t N>
  MUSTER_INLINE static void narrow(const Value* from, std::byte* to) {
    for (std::size_t i = 0; i < N; i += lanes) {
      Words all;
      std::memcpy(&all, from + i, sizeof all);
      const Words value = all & 0x7fffffffU;
      Words bits = (value + ((1U << (shift - 1)) - 1) + ((value >> shift) & 1U) - rebias) >> shift;
      const Words is_large = reinterpret_cast<Words>(bits > overflow);
      bits = (bits & ~is_large) | (is_large & overflow);
      const Floats subnormal = reinterpret_cast<Floats>(value) + std::bit_cast<float>(rounder);
      const Words is_small = reinterpret_cast<Words>(value < smallest_normal);
      bits = ((reinterpret_cast<Words>(subnormal) - rounder) & is_small) | (bits & ~is_small);
      const Words is_nan = reinterpret_cast<Words>(value > 0x7f800000U);
      bits = (bits & ~is_nan) | (is_nan & nan);
      bits |= (all >> (31 - Exponent - Mantissa)) & sign;
      const Narrow stored = __builtin_convertvector(bits, Narrow);
      std::memcpy(to + i * sizeof(Bits), &stored, sizeof stored);
    }
  }

 private:
  static constexpr std::size_t lanes = 8;
  using Words [[gnu::vector_size(32)]] = std::uint32_t;
  using Floats [[gnu::vector_size(32)]] = float;
  using Narrow [[gnu::vector_size(8 * sizeof(Bits))]] = Bits;

  static constexpr int bias = (1 << (Exponent - 1)) - 1;
  static constexpr int shift = 23 - Mantissa;
  static constexpr std::uint32_t magnitude = (1U << (Exponent + Mantissa)) - 1;
  static constexpr std::uint32_t infinity = ((1U << Exponent) - 1) << Mantissa;
  static constexpr std::uint32_t sign = magnitude + 1;
  static constexpr std::uint32_t rebias = static_cast<std::uint32_t>(127 - bias) << 23;
  static constexpr std::uint32_t smallest_normal = rebias + (1U << 23);
  /// The last digit of this float equals the smallest subnormal number of the format, so adding it rounds to a multiple
  /// of that number.
  static constexpr std::uint32_t rounder = static_cast<std::uint32_t>(151 - bias - Mantissa) << 23;
  static constexpr std::uint32_t overflow = Finite ? magnitude : infinity;
  static constexpr std::uint32_t nan = Finite ? magnitude : infinity | (1U << (Mantissa - 1));
};
using F16 = Small<std::uint16_t, 5, 10, false>;
using E5M2 = Small<std::uint8_t, 5, 2, false>;
using E4M3 = Small<std::uint8_t, 4, 3, true>;

}  // namespace muster::merge

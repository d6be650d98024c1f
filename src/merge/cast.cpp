// SPDX-License-Identifier: Apache-2.0
#include "src/merge/cast.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "src/merge/numbers.hpp"

namespace muster::merge {
namespace {

constexpr std::size_t cast_block = 64;

/// Converts a double to a float for further rounding to a narrower format, without double rounding. If the float is not
/// exact, its last bit is set, so that it rounds as the double would.
float sticky(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || std::isnan(value)) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

struct F64 {
  using Stored = double;
};

template <class From, class To>
void widen_block(const std::byte* from, float* to) {
  if constexpr (std::is_same_v<From, F64>) {
    for (std::size_t i = 0; i < cast_block; ++i) {
      double value = 0;
      std::memcpy(&value, from + i * sizeof value, sizeof value);
      to[i] = sizeof(typename To::Stored) == sizeof(float) ? static_cast<float>(value) : sticky(value);
    }
  } else {
    From::template widen<cast_block>(from, to);
  }
}

template <class From, class To>
std::optional<std::size_t> cast_all(std::span<const std::byte> source, std::span<std::byte> target) {
  constexpr std::size_t from_size = sizeof(typename From::Stored);
  constexpr std::size_t to_size = sizeof(typename To::Stored);
  const std::size_t count = source.size() / from_size;
  std::optional<std::size_t> first;
  std::array<float, cast_block> values{};
  std::array<float, cast_block> again{};
  std::array<std::byte, cast_block * from_size> in{};
  std::array<std::byte, cast_block * to_size> out{};
  for (std::size_t at = 0; at < count; at += cast_block) {
    const std::size_t now = std::min(cast_block, count - at);
    std::ranges::copy(source.subspan(at * from_size, now * from_size), in.begin());
    widen_block<From, To>(in.data(), values.data());
    To::template narrow<cast_block>(values.data(), out.data());
    std::ranges::copy(std::span(out).first(now * to_size), target.begin() + static_cast<std::ptrdiff_t>(at * to_size));
    if (first) continue;
    To::template widen<cast_block>(out.data(), again.data());
    for (std::size_t i = 0; i < now && !first; ++i) {
      if (!std::isinf(again[i])) continue;
      bool was_finite = std::isfinite(values[i]);
      if constexpr (std::is_same_v<From, F64>) {
        double value = 0;
        std::memcpy(&value, in.data() + i * from_size, sizeof value);
        was_finite = std::isfinite(value);
      }
      if (was_finite) first = at + i;
    }
  }
  return first;
}

template <class From>
std::optional<std::size_t> cast_from(std::span<const std::byte> source, DType to, std::span<std::byte> target) {
  if (to == DType::f16) return cast_all<From, F16>(source, target);
  if (to == DType::bf16) return cast_all<From, Bf16>(source, target);
  return cast_all<From, Plain<float>>(source, target);
}

}  // namespace

bool can_cast(DType from, DType to) noexcept {
  const bool is_target = to == DType::f16 || to == DType::bf16 || to == DType::f32;
  return is_target && (from == DType::f64 || from == DType::f32 || from == DType::f16 || from == DType::bf16);
}

std::optional<std::size_t> cast(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target) {
  switch (from) {
    case DType::f64:
      return cast_from<F64>(source, to, target);
    case DType::f16:
      return cast_from<F16>(source, to, target);
    case DType::bf16:
      return cast_from<Bf16>(source, to, target);
    default:
      return cast_from<Plain<float>>(source, to, target);
  }
}

}  // namespace muster::merge

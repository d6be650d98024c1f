// SPDX-License-Identifier: Apache-2.0
#pragma once
// Literals for byte counts: `using namespace muster::literals; 256_MiB`.

#include <cstdint>

namespace muster {
inline namespace literals {

/// Returns `n` KiB in bytes.
constexpr std::uint64_t operator""_KiB(unsigned long long n) {
  return n << 10;
}
/// Returns `n` MiB in bytes.
constexpr std::uint64_t operator""_MiB(unsigned long long n) {
  return n << 20;
}
/// Returns `n` GiB in bytes.
constexpr std::uint64_t operator""_GiB(unsigned long long n) {
  return n << 30;
}

}  // namespace literals
}  // namespace muster

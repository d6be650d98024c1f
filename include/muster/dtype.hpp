// SPDX-License-Identifier: Apache-2.0
#pragma once
// Element types. Names are those of safetensors ("BF16"), which every tool of the field knows.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace muster {

/// The numbers are part of the descriptor's wire format: never reuse one.
enum class DType : std::uint8_t {
  boolean = 0,
  u8 = 1,
  i8 = 2,
  u16 = 3,
  i16 = 4,
  u32 = 5,
  i32 = 6,
  u64 = 7,
  i64 = 8,
  f16 = 9,
  bf16 = 10,
  f32 = 11,
  f64 = 12,
  f8_e4m3fn = 13,
  f8_e5m2 = 14,
  f8_e8m0 = 15,      ///< scales of microscaling formats
  f4_e2m1 = 16,      ///< packed: two elements a byte, the first in the low nibble
  u4 = 17,           ///< packed likewise
  i4 = 18,           ///< packed likewise
  complex64 = 19,    ///< two f32: real, imaginary
  f8_e4m3fnuz = 20,  ///< finite, one zero, one NaN: AMD's
  f8_e5m2fnuz = 21,  ///< likewise
  f6_e2m3 = 22,      ///< packed: four elements in three bytes, the first in the lowest bits
  f6_e3m2 = 23,      ///< packed likewise
};

/// The dtype of a C++ type: integers of whatever name, bool, std::byte (u8), float and double. A program says so of
/// types of its own by a specialisation: `template <> struct muster::DTypeOf<half> { static constexpr DType value =
/// DType::f16; };`.
template <class T>
struct DTypeOf;
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

/// All of them, in the order of their numbers.
std::span<const DType> all_dtypes() noexcept;

/// Bits of one element: 4 or 6 for the packed types, a multiple of 8 for all others.
int bits(DType dtype) noexcept;

/// Bytes of one element; 0 for packed types, whose elements have no address.
std::size_t itemsize(DType dtype) noexcept;

/// Whether elements share bytes: such tensors are always contiguous and keep their logical shape.
bool is_packed(DType dtype) noexcept;

/// The fewest elements that fill whole bytes: 2 of 4 bits, 4 of 6 bits, 1 of all others.
int elements_in_group(DType dtype) noexcept;

/// safetensors' name: "BOOL", "U8", "BF16", "F8_E4M3", "F4" ...; "U4" and "I4" are ours.
std::string_view to_string(DType dtype) noexcept;

/// The dtype of a name in safetensors' spelling; none if the name is not known.
std::optional<DType> dtype_from_string(std::string_view name) noexcept;

/// The dtype of a wire number; none if no dtype has it.
std::optional<DType> dtype_from_number(std::uint8_t number) noexcept;

template <class T>
requires(std::integral<T> && sizeof(T) <= 8 && !std::same_as<T, char> && !std::same_as<T, wchar_t>) struct DTypeOf<T> {
  static constexpr DType value = [] {
    if (std::same_as<T, bool>) return DType::boolean;
    constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(1);
    switch (sizeof(T)) {
      case 1:
        return is_signed ? DType::i8 : DType::u8;
      case 2:
        return is_signed ? DType::i16 : DType::u16;
      case 4:
        return is_signed ? DType::i32 : DType::u32;
      default:
        return is_signed ? DType::i64 : DType::u64;
    }
  }();
};
template <>
struct DTypeOf<std::byte> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};

}  // namespace muster

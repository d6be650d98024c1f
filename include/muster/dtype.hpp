// SPDX-License-Identifier: Apache-2.0
#pragma once
// Element types. Their names are those of safetensors ("BF16").

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace muster {

/// The type of the elements of a tensor. The numbers are part of the wire format of descriptors: never reuse one.
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
  f4_e2m1 = 16,      ///< packed: two elements per byte, the first in the low nibble
  u4 = 17,           ///< packed like f4_e2m1
  i4 = 18,           ///< packed like f4_e2m1
  complex64 = 19,    ///< two f32: real, imaginary
  f8_e4m3fnuz = 20,  ///< AMD format: finite, one zero, one NaN
  f8_e5m2fnuz = 21,  ///< AMD format: finite, one zero, one NaN
  f6_e2m3 = 22,      ///< packed: four elements in three bytes, the first in the lowest bits
  f6_e3m2 = 23,      ///< packed like f6_e2m3
};

/// Maps a C++ type to its dtype: all integer types, bool, std::byte (u8), float and double. A program adds its own
/// types with a specialization: `template <> struct muster::DTypeOf<half> { static constexpr DType value = DType::f16;
/// };`.
template <class T>
struct DTypeOf;
/// The dtype of a C++ type (DTypeOf).
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

/// Returns all dtypes, in the order of their numbers.
std::span<const DType> all_dtypes() noexcept;

/// Returns the number of bits of one element: 4 or 6 for packed types, a multiple of 8 for all others.
int bits(DType dtype) noexcept;

/// Returns the number of bytes of one element; 0 for packed types, whose elements are not addressable.
std::size_t itemsize(DType dtype) noexcept;

/// Returns whether elements share bytes. Tensors of such a dtype are always contiguous and keep their logical shape.
bool is_packed(DType dtype) noexcept;

/// Returns the smallest number of elements that fills whole bytes: 2 for 4 bits, 4 for 6 bits, 1 for all others.
int elements_in_group(DType dtype) noexcept;

/// Returns the safetensors name: "BOOL", "U8", "BF16", "F8_E4M3", "F4" ... The names "U4" and "I4" are Muster
/// extensions.
std::string_view to_string(DType dtype) noexcept;

/// Returns the dtype with a safetensors name; nullopt if the name is unknown.
std::optional<DType> dtype_from_string(std::string_view name) noexcept;

/// Returns the dtype with a wire number; nullopt if the number is unknown.
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements one by one: their bits, and the numbers that these stand for. For what looks at values; what reckons with
// whole tensors has its own ways (src/merge/reduce.hpp). A complex number is two values of F32 here.

#include <cstddef>
#include <cstdint>
#include <span>

#include "muster/config.hpp"
#include "muster/dtype.hpp"

namespace muster::inspect {

/// The dtype of one value: that of the tensor, F32 for complex numbers.
DType value_dtype(DType dtype) noexcept;
/// Values of an element: 2 for complex numbers, else 1.
std::uint64_t values_per_element(DType dtype) noexcept;
/// Values in `bytes` bytes; both halves of each byte count for packed types.
std::uint64_t values_in(DType dtype, std::uint64_t bytes) noexcept;

/// The bits of a value of a run that holds it, in the low bits; nothing need be aligned.
std::uint64_t value_bits(DType dtype, std::span<const std::byte> run, std::uint64_t index) noexcept;

/// The number that bits stand for; integers beyond 53 bits are rounded.
double value_of(DType dtype, std::uint64_t bits) noexcept;

/// Likewise exactly: an integer for integer types, a boolean for BOOL, else a real number.
Config exact_value(DType dtype, std::uint64_t bits);

/// Integers and booleans.
bool is_integer(DType dtype) noexcept;

/// What a real number of JSON is: the number, or the string "nan", "inf" or "-inf".
Config json_number(double value);

/// The fewest digits that read back as the same value of this dtype, as "0.1", "1e-07", "nan" or "-inf". Integers in
/// full, booleans as "True" and "False".
std::string value_text(DType dtype, std::uint64_t bits);

/// Significant decimal digits that value_text needs, of a finite number that is not 0; at most 17.
int value_digits(DType dtype, double value) noexcept;

}  // namespace muster::inspect

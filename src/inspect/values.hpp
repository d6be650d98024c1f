// SPDX-License-Identifier: Apache-2.0
#pragma once
// How far two runs of elements are apart.

#include <cstddef>
#include <cstdint>
#include <span>

#include "muster/dtype.hpp"

namespace muster::inspect {

struct ValueDifference {
  std::uint64_t elements = 0;  ///< whose bits differ
  std::uint64_t nans = 0;      ///< of these, NaN on one side only
  double absolute = 0;         ///< the largest |a - b|; infinite where one of them is
  double relative = 0;         ///< the largest |a - b| / max(|a|, |b|)

  void add(const ValueDifference& other) noexcept;
};

/// Of the elements of equally long runs; complex numbers are pairs of F32. NaN on both sides, and 0 beside -0, count as
/// elements but are no distance apart. Where the last byte of a packed dtype is half used, both halves count.
ValueDifference compare_values(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace muster::inspect

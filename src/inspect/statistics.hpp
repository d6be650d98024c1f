// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the values of tensors are like: range, moments, what is no number, and how they are distributed.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/progress.hpp"
#include "muster/safetensors.hpp"

namespace muster::inspect {

class TensorSource;

/// Equally wide bins from the smallest to the largest finite value; the largest is in the last bin.
struct Histogram {
  double low = 0;
  double high = 0;
  std::vector<std::uint64_t> counts;  ///< empty where nothing is finite, one where all are equal
};

/// Of one tensor; a complex number is two values.
struct TensorStatistics {
  TensorEntry tensor;
  std::uint64_t values = 0;
  std::uint64_t nans = 0;
  std::uint64_t infinities = 0;  ///< of either sign
  std::uint64_t zeros = 0;       ///< -0 too
  Config minimum = {};           ///< of the finite values, exact: an integer, a boolean or a real; null: there is none
  Config maximum = {};
  double mean = 0;       ///< of the finite values
  double deviation = 0;  ///< standard deviation of the finite values, divided by their number
  Histogram histogram = {};

  [[nodiscard]] std::uint64_t finite() const noexcept { return values - nans - infinities; }
};

/// The tensors of these places, each read once (types of up to 16 bits and small tensors) or twice, by several threads
/// in pieces of some MiB. The same result whatever the number of threads. `bins` is at least 1. Throws as
/// TensorSource::read.
std::vector<TensorStatistics> statistics(const TensorSource& source, const std::vector<std::size_t>& tensors,
                                         std::size_t bins, const ProgressCallback& progress = {});

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the values of tensors are like: range, moments, what is no number, and how they are distributed.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/progress.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/source.hpp"

namespace muster::inspect {

/// Equally wide bins from the smallest to the largest finite value; the largest is in the last bin.
struct Histogram {
  double low = 0;
  double high = 0;
  std::vector<std::uint64_t> counts;  ///< empty if nothing is finite, one if all are equal
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

struct StatsOptions {
  std::string pattern = {};     ///< only tensors whose names match (TensorPattern::glob); empty: all
  std::size_t bins = 16;        ///< of each histogram
  bool has_histograms = false;  ///< under each tensor, not only if there is one alone
  OutputStyle style = {};
  ProgressCallback progress = {};
};

/// A row a tensor and a histogram if it is asked for; one tensor alone has its histogram. Lines end with '\n'.
/// Throws as TensorSource::read; Error(not_found) if no name matches, with names that are near.
std::string stats_text(const Source& source, const StatsOptions& options);

/// {"tensors": [{"name", "dtype", "shape", "bytes", "values", "nans", "infinities", "zeros", "minimum", "maximum",
/// "mean", "deviation", "histogram": {"low", "high", "counts"}}]} (docs/inspecting.md). Throws likewise.
Config stats_tree(const Source& source, const StatsOptions& options);

}  // namespace muster::inspect

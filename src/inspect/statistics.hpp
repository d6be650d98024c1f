// SPDX-License-Identifier: Apache-2.0
#pragma once
// Statistics of the values of tensors: range, moments, values that are not finite, and their distribution.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/progress.hpp"
#include "src/checkpoint/source.hpp"
#include "src/inspect/output.hpp"

namespace muster::inspect {

/// Bins of equal width from the smallest to the largest finite value; the last bin includes the largest.
struct Histogram {
  double low = 0;
  double high = 0;
  std::vector<std::uint64_t> counts;  ///< empty if no value is finite, one bin if all are equal
};

/// The statistics of one tensor; a complex number is two values.
struct TensorStatistics {
  TensorEntry tensor;
  std::uint64_t values = 0;
  std::uint64_t nans = 0;
  std::uint64_t infinities = 0;  ///< of either sign
  std::uint64_t zeros = 0;       ///< including -0
  /// of the finite values, exact: an integer, a boolean or a real number; null if no value is finite
  Config minimum = {};
  Config maximum = {};
  double mean = 0;       ///< of the finite values
  double deviation = 0;  ///< population standard deviation of the finite values
  Histogram histogram = {};

  [[nodiscard]] std::uint64_t finite() const noexcept { return values - nans - infinities; }
};

/// Computes the statistics of the tensors with these indices. Types of up to 16 bits and small tensors are read once,
/// others twice, by several threads in pieces of some MiB. The result does not depend on the number of threads. `bins`
/// is at least 1. Throws as TensorSource::read.
std::vector<TensorStatistics> statistics(const TensorSource& source, const std::vector<std::size_t>& tensors,
                                         std::size_t bins, const ProgressCallback& progress = {});

/// Returns the statistics of several tensors together; `tensor` is that of the first one. There are `bins` bins, or one
/// if all values are equal. Each count of a tensor is added to the bin at the middle of the tensor's bin. `members` is
/// not empty.
TensorStatistics pooled(const std::vector<const TensorStatistics*>& members, std::size_t bins);

/// Returns a minimum or maximum as a number: a boolean is 0 or 1. Integers beyond 53 bits are rounded.
double number_of(const Config& value);

enum class StatsOrder : std::uint8_t {
  file,  ///< as in the source
  name,
  size,  ///< largest first
};

struct StatsOptions {
  TensorFilter filter = {};
  StatsOrder order = StatsOrder::file;
  std::size_t bins = 16;        ///< per histogram
  bool has_histograms = false;  ///< print histograms of all tensors, even if there are several
  OutputStyle style = {};
  ProgressCallback progress = {};
};

/// Returns one row per tensor, and its histogram if requested; a single tensor always has its histogram. Lines end with
/// '\n'. Throws as TensorSource::read; Error(not_found) with similar names if no name matches.
std::string stats_text(const Source& source, const StatsOptions& options);

/// Writes {"tensors": [{"name", "dtype", "shape", "bytes", "values", "nans", "infinities", "zeros", "minimum",
/// "maximum", "mean", "deviation", "histogram": {"low", "high", "counts"}}]} (docs/reference/json-output.md). Throws as
/// stats_text, and what `sink` throws.
void stats_json(const Source& source, const StatsOptions& options, const Sink& sink);

}  // namespace muster::inspect

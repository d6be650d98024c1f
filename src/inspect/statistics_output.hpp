// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster stats` says.

#include <string>
#include <vector>

#include "src/inspect/statistics.hpp"
#include "src/inspect/text_table.hpp"

namespace muster::inspect {

struct StatsOptions {
  std::string pattern = {};     ///< only tensors whose names match (TensorPattern::glob); empty: all
  std::size_t bins = 16;        ///< of each histogram
  bool has_histograms = false;  ///< under each tensor, not only where there is one alone
  OutputStyle style = {};
  ProgressCallback progress = {};
};

/// A row a tensor and a histogram where it is asked for; one tensor alone has its histogram. Lines end with '\n'.
/// Throws as TensorSource::read; Error(not_found) where no name matches, with names that are near.
std::string stats_text(const TensorSource& source, const StatsOptions& options);

/// {"tensors": [{"name", "dtype", "shape", "bytes", "values", "nans", "infinities", "zeros", "minimum", "maximum",
/// "mean", "deviation", "histogram": {"low", "high", "counts"}}]} (docs/inspecting.md). Throws likewise.
std::string stats_json(const TensorSource& source, const StatsOptions& options);

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reports as self-contained HTML pages: the data of models, differences, workspaces, traces and versions of weights as
// one JSON tree, and the page that draws it (docs/reference/report-file.md).

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"
#include "src/checkpoint/source.hpp"

namespace muster::report {

struct ReportOptions {
  SourceOptions source = {};
  TensorFilter filter = {};
  bool is_diff = false;                       ///< compares the two paths
  bool has_values = true;                     ///< reads all values; false: only headers
  bool has_checksums = false;                 ///< also compares the values with the checksums, which reads them again
  std::size_t bins = 24;                      ///< per histogram
  std::optional<ParallelLayout> layout = {};  ///< also draws how this layout would cut each model
  ProgressCallback progress = {};
};

/// Reads the paths and returns the data of the report. A directory with traces, a workspace and a directory with
/// versions of weights are recognised; every other path is a source of tensors. Throws Error(invalid_argument) if
/// `is_diff` is set without exactly two paths. Also throws what open_source(), statistics(),
/// inspect::diff_models(), inspect::read_trace(), read_versions() and shard_model() throw.
Config report_tree(const std::vector<std::string>& paths, const ReportOptions& options);

/// Returns the HTML page with this data.
std::string report_page(const Config& tree);

}  // namespace muster::report

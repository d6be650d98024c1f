// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sections of a report, as trees (docs/reference/report-file.md).

#include <optional>
#include <string>

#include "muster/config.hpp"
#include "src/checkpoint/source.hpp"
#include "src/report/report.hpp"

namespace muster::report {

/// Returns the section `model` with the tensors that `options.filter` selects. Throws as open_source() and
/// statistics().
Config model_section(Source source, const ReportOptions& options);

/// Returns the parts of a source that was merged from shards; nullopt if the source is not merged.
std::optional<Config> joined_parts(const TensorSource& source);
/// Returns the parts into which `layout` cuts the model at `path`, which is read as `request` describes. Throws as
/// shard_model().
Config cut_parts(SourceOptions request, const std::string& path, const ParallelLayout& layout);

/// Returns the section `diff`. Throws as inspect::diff_models().
Config diff_section(const std::string& a, const std::string& b, const ReportOptions& options);

/// Returns the section `workspace`, to which report_tree() adds "model_error". Throws as workspace::survey().
Config workspace_section(const std::string& path);

/// Returns the section `trace`. Throws as inspect::read_trace().
Config trace_section(const std::string& directory);

/// Returns the section `versions`. Throws as read_versions().
Config versions_section(const std::string& path);

}  // namespace muster::report

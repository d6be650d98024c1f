// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sections of a report, as trees (docs/reference/report-file.md).

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include "muster/config.hpp"
#include "src/checkpoint/source.hpp"
#include "src/report/report.hpp"

namespace muster::report {

/// The limit of most lists of a report.
inline constexpr std::size_t most_items = 2000;
/// Limits the list `key` of an object, and sets "KEY_left_out" to the number of further items.
void limit_list(Config& object, const std::string& key);

/// Returns the section `model` with the tensors that `options.filter` selects. Throws as open_source() and
/// statistics().
Config model_section(const Source& source, const ReportOptions& options);

/// Returns the parts of the tensors with these names, if the source was merged from shards; otherwise nullopt.
std::optional<Config> joined_parts(const TensorSource& source, const std::unordered_set<std::string_view>& names);
/// Returns the parts into which `layout` cuts the tensors with these names. The model at `path` is read as `request`
/// describes. Throws as shard_model().
Config cut_parts(SourceOptions request, const std::string& path, const ParallelLayout& layout,
                 const std::unordered_set<std::string_view>& names);

/// Returns the section `diff`. Throws as inspect::diff_models().
Config diff_section(const std::string& a, const std::string& b, const ReportOptions& options);

/// Returns the section `workspace`, to which report_tree() adds "model_error". Throws as workspace::survey().
Config workspace_section(const std::string& path);

/// Returns the section `trace`. Throws as inspect::read_trace().
Config trace_section(const std::string& directory);

/// Returns the section `versions`. Throws as read_versions().
Config versions_section(const std::string& path);

}  // namespace muster::report

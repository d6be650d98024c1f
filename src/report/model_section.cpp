// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "muster/error.hpp"
#include "muster/verify.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/inspect/elements.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/show.hpp"
#include "src/inspect/statistics.hpp"
#include "src/report/rows.hpp"
#include "src/report/sections.hpp"

namespace muster::report {
namespace {

using inspect::TensorStatistics;

constexpr std::size_t most_metadata = 100'000;   // bytes of keys and texts
constexpr std::size_t longest_config = 200'000;  // bytes of JSON text
constexpr int deepest_config = 200;              // the tree of a report has a limit, and more levels around it

double magnitude(const TensorStatistics& one) {
  return one.finite() == 0
             ? 0
             : std::max(std::abs(inspect::number_of(one.minimum)), std::abs(inspect::number_of(one.maximum)));
}

/// The columns of the values, row by row.
class ValueColumns {
 public:
  ValueColumns(const std::vector<TensorStatistics>& all, std::size_t bins) : all_(all), bins_(bins) {}

  void add(const Row& row) {
    std::vector<const TensorStatistics*> members;
    for (const std::size_t member : row.members) members.push_back(&all_[member]);
    const TensorStatistics one = inspect::pooled(members, bins_);
    const auto if_any = [&](double value) { return one.finite() != 0 ? inspect::json_number(value) : Config(); };
    values_.emplace_back(one.values);
    nans_.emplace_back(one.nans);
    infinities_.emplace_back(one.infinities);
    zeros_.emplace_back(one.zeros);
    minimum_.push_back(inspect::json_number(one.minimum));
    maximum_.push_back(inspect::json_number(one.maximum));
    mean_.push_back(if_any(one.mean));
    deviation_.push_back(if_any(one.deviation));
    histogram_.emplace_back(ConfigArray(one.histogram.counts.begin(), one.histogram.counts.end()));
    outliers_.emplace_back(members.size() == 1 ? ConfigArray() : outliers_of(members));
  }

  void move_to(Config& rows) {
    rows["values"] = std::move(values_);
    rows["nans"] = std::move(nans_);
    rows["infinities"] = std::move(infinities_);
    rows["zeros"] = std::move(zeros_);
    rows["minimum"] = std::move(minimum_);
    rows["maximum"] = std::move(maximum_);
    rows["mean"] = std::move(mean_);
    rows["deviation"] = std::move(deviation_);
    rows["histogram"] = std::move(histogram_);
    rows["outliers"] = std::move(outliers_);
  }
  /// The number of outliers that are not named because the page would become too large.
  [[nodiscard]] std::uint64_t unnamed() const noexcept { return unnamed_; }

 private:
  /// Names the members of a row that differ from the others: the row itself would hide them.
  ConfigArray outliers_of(const std::vector<const TensorStatistics*>& members) {
    constexpr std::size_t most = 3;  // per reason
    ConfigArray outliers;
    const auto add = [&](const TensorStatistics& one, const char* reason) {
      const std::string& name = one.tensor.name;
      if (name.size() > name_bytes_left_) {
        ++unnamed_;
        return;
      }
      name_bytes_left_ -= name.size();
      outliers.push_back(Config::object({{"name", name}, {"reason", reason}}));
    };
    const auto add_first = [&](const char* reason, const auto& is_outlier) {
      std::size_t found = 0;
      for (const TensorStatistics* one : members)
        if (found < most && is_outlier(*one)) {
          add(*one, reason);
          ++found;
        }
    };
    add_first("nan", [](const TensorStatistics& one) { return one.nans != 0; });
    add_first("infinite", [](const TensorStatistics& one) { return one.infinities != 0; });
    add_first("zero", [](const TensorStatistics& one) { return one.values != 0 && one.zeros == one.values; });
    const TensorStatistics& largest =
        **std::ranges::max_element(members, {}, [](const TensorStatistics* one) { return magnitude(*one); });
    if (magnitude(largest) > 0) add(largest, "largest");
    return outliers;
  }

  const std::vector<TensorStatistics>& all_;
  std::size_t bins_;
  std::size_t name_bytes_left_ = 300'000;
  std::uint64_t unnamed_ = 0;
  ConfigArray values_, nans_, infinities_, zeros_, minimum_, maximum_, mean_, deviation_, histogram_, outliers_;
};

/// Returns the index of each selected tensor's file, or null.
std::vector<Config> files_of(const Source& source, const std::vector<std::size_t>& chosen) {
  std::unordered_map<std::string_view, std::size_t> known;
  for (std::size_t i = 0; i < source.files.size(); ++i) known.emplace(source.files[i].path, i);
  std::vector<Config> files;
  for (const std::size_t tensor : chosen) {
    const auto found = known.find(source.tensors->detail(tensor).file);
    const bool is_listed = found != known.end() && found->second < most_items;
    files.push_back(is_listed ? Config(found->second) : Config());
  }
  return files;
}

/// Adds "rows" and "outliers_left_out". `columns` is null without statistics.
void add_rows(Config& section, const Source& source, const std::vector<std::size_t>& chosen, ValueColumns* columns) {
  const std::vector<TensorEntry>& entries = source.entries();
  std::vector<std::string_view> names;
  for (const std::size_t tensor : chosen) names.emplace_back(entries[tensor].name);
  const std::vector<Config> files = files_of(source, chosen);
  const auto entry_of = [&](std::size_t member) -> const TensorEntry& { return entries[chosen[member]]; };
  ConfigArray name, tensors, bytes, dtype, shape, file;
  for (const Row& row : rows_of(names)) {
    std::uint64_t sum = 0;
    for (const std::size_t member : row.members) sum += entry_of(member).bytes;
    name.emplace_back(row.name);
    tensors.emplace_back(row.members.size());
    bytes.emplace_back(sum);
    dtype.push_back(common_value(row, [&](std::size_t member) { return Config(to_string(entry_of(member).dtype)); }));
    shape.push_back(common_value(row, [&](std::size_t member) { return inspect::extents_of(entry_of(member).shape); }));
    file.push_back(common_value(row, [&](std::size_t member) { return files[member]; }));
    if (columns != nullptr) columns->add(row);
  }
  Config rows = Config::object({{"name", std::move(name)},
                                {"tensors", std::move(tensors)},
                                {"bytes", std::move(bytes)},
                                {"dtype", std::move(dtype)},
                                {"shape", std::move(shape)},
                                {"file", std::move(file)}});
  if (columns != nullptr) columns->move_to(rows);
  section["rows"] = std::move(rows);
  section["outliers_left_out"] = columns != nullptr ? columns->unnamed() : 0;
}

Config dtypes_tree(const Source& source, const std::vector<std::size_t>& chosen) {
  std::map<std::string_view, std::pair<std::uint64_t, std::uint64_t>> sums;
  for (const std::size_t tensor : chosen) {
    auto& [tensors, bytes] = sums[to_string(source.entries()[tensor].dtype)];
    ++tensors;
    bytes += source.entries()[tensor].bytes;
  }
  Config tree = Config::object();
  for (const auto& [dtype, sum] : sums)
    tree[std::string(dtype)] = Config::object({{"tensors", sum.first}, {"bytes", sum.second}});
  return tree;
}

/// Adds "metadata" and "metadata_left_out".
void add_metadata(Config& section, const Source& source) {
  Config tree = Config::object();
  std::size_t bytes_left = most_metadata;
  std::uint64_t left_out = 0;
  for (const auto& [key, value] : source.metadata) {
    const std::size_t bytes = key.size() + value.size();
    if (bytes > bytes_left) {
      ++left_out;
      continue;
    }
    bytes_left -= bytes;
    tree[is_utf8(key) ? key : inspect::printable(key)] = value;
  }
  section["metadata"] = std::move(tree);
  section["metadata_left_out"] = left_out;
}

/// Adds "verify" and "verify_error".
void add_verification(Config& section, const Source& source, const ReportOptions& options) {
  section["verify"] = Config();
  section["verify_error"] = Config();
  try {
    VerifyOptions wanted{.checksums = options.has_checksums,
                         .progress = options.has_checksums ? options.progress : ProgressCallback(),
                         .key = options.source.thirdparty.key,
                         .file_pattern = options.source.thirdparty.file_pattern,
                         .plan = options.source.plan,
                         .base_model = options.source.base_model,
                         .source_layout = options.source.source_layout,
                         .select = options.filter.select,
                         .exclude = options.filter.exclude};
    Config report = inspect::verify_tree(verify(source.path, wanted));
    const std::uint64_t problems_left_out = report.at("problems_left_out").as_uint();
    for (const char* list : {"problems", "left_out", "notes"}) limit_list(report, list);
    report["problems_left_out"] = report.at("problems_left_out").as_uint() + problems_left_out;
    section["verify"] = std::move(report);
  } catch (const Error& error) {
    section["verify_error"] = error.what();
  }
}

int depth_of(const Config& tree) {
  int depth = 0;
  if (tree.is_array())
    for (const Config& item : tree.as_array()) depth = std::max(depth, depth_of(item));
  if (tree.is_object())
    for (const auto& [key, value] : tree.as_object()) depth = std::max(depth, depth_of(value));
  return depth + 1;
}

/// Adds "config" and "config_bytes". A config that cannot be read becomes an issue.
void add_config(Config& section, const Source& source, std::vector<SourceIssue>& issues) {
  section["config"] = Config();
  section["config_bytes"] = 0;
  try {
    const std::optional<Config> config = source.config();
    if (!config) return;
    const std::size_t bytes = to_json(*config).size();
    section["config_bytes"] = bytes;
    if (bytes <= longest_config && depth_of(*config) <= deepest_config) section["config"] = *config;
  } catch (const Error& error) {
    issues.push_back({"config", "", error.what()});
  }
}

Config parts_tree(const Source& source, const std::vector<std::size_t>& chosen, const ReportOptions& options) {
  std::unordered_set<std::string_view> names;
  for (const std::size_t tensor : chosen) names.insert(source.entries()[tensor].name);
  if (options.layout) return cut_parts(options.source, source.path, *options.layout, names);
  std::optional<Config> parts = joined_parts(*source.tensors, names);
  if (!parts) return {};
  for (const auto& [key, value] : source.facts)
    if (key == "layout" || key == "plan" || key == "ranks") (*parts)[key] = value;
  return std::move(*parts);
}

}  // namespace

Config model_section(const Source& source, const ReportOptions& options) {
  const std::vector<std::size_t> chosen = matching(source, options.filter);
  std::vector<TensorStatistics> statistics;
  if (options.has_values) statistics = inspect::statistics(*source.tensors, chosen, options.bins, options.progress);
  ValueColumns columns(statistics, options.bins);
  std::uint64_t bytes = 0;
  for (const std::size_t tensor : chosen) bytes += source.entries()[tensor].bytes;
  ConfigObject facts;
  for (const auto& [key, value] : source.facts) facts.insert(key, value);
  std::vector<SourceIssue> issues = inspect::find_issues(source);
  Config section = Config::object({{"section", "model"},
                                   {"path", source.path},
                                   {"kind", source.kind},
                                   {"facts", std::move(facts)},
                                   {"tensors", chosen.size()},
                                   {"bytes", bytes},
                                   {"not_readable", count_lost(source.tensors->omissions())},
                                   {"not_selected", source.entries().size() - chosen.size()},
                                   {"files", inspect::list_of(source.files, inspect::file_tree)},
                                   {"dtypes", dtypes_tree(source, chosen)},
                                   {"has_values", options.has_values}});
  add_rows(section, source, chosen, options.has_values ? &columns : nullptr);
  add_metadata(section, source);
  add_verification(section, source, options);
  add_config(section, source, issues);
  section["issues"] = inspect::list_of(issues, inspect::issue_tree);
  section["parts"] = parts_tree(source, chosen, options);
  for (const char* list : {"files", "issues"}) limit_list(section, list);
  return section;
}

}  // namespace muster::report

// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <unordered_map>
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

constexpr std::size_t most_issues = 1000;
constexpr std::size_t longest_metadata = 4000;
constexpr std::size_t longest_config = 200'000;

/// The statistics of several tensors together.
class PooledStatistics {
 public:
  void add(const TensorStatistics& one) {
    values_ += one.values;
    nans_ += one.nans;
    infinities_ += one.infinities;
    zeros_ += one.zeros;
    if (one.finite() == 0) return;
    if (finite_ == 0 || one.minimum.as_double() < minimum_.as_double()) minimum_ = one.minimum;
    if (finite_ == 0 || one.maximum.as_double() > maximum_.as_double()) maximum_ = one.maximum;
    // Chan, Golub, LeVeque 1979, as in statistics.cpp.
    const auto mine = static_cast<double>(finite_);
    const auto others = static_cast<double>(one.finite());
    const double apart = one.mean - mean_;
    mean_ += apart * (others / (mine + others));
    squares_ += one.deviation * one.deviation * others + apart * apart * (mine * others / (mine + others));
    finite_ += one.finite();
  }

  [[nodiscard]] std::uint64_t values() const { return values_; }
  [[nodiscard]] std::uint64_t nans() const { return nans_; }
  [[nodiscard]] std::uint64_t infinities() const { return infinities_; }
  [[nodiscard]] std::uint64_t zeros() const { return zeros_; }
  [[nodiscard]] bool has_numbers() const { return finite_ != 0; }
  [[nodiscard]] const Config& minimum() const { return minimum_; }
  [[nodiscard]] const Config& maximum() const { return maximum_; }
  [[nodiscard]] double mean() const { return mean_; }
  [[nodiscard]] double deviation() const { return std::sqrt(squares_ / static_cast<double>(finite_)); }

 private:
  std::uint64_t values_ = 0;
  std::uint64_t nans_ = 0;
  std::uint64_t infinities_ = 0;
  std::uint64_t zeros_ = 0;
  std::uint64_t finite_ = 0;
  Config minimum_;
  Config maximum_;
  double mean_ = 0;
  double squares_ = 0;
};

/// Adds the counts of a histogram to the bins between `low` and `high` that contain the middles of its bins.
void add_counts(std::vector<std::uint64_t>& counts, const inspect::Histogram& histogram, double low, double high) {
  const auto bins = static_cast<double>(histogram.counts.size());
  for (std::size_t i = 0; i < histogram.counts.size(); ++i) {
    const double part = (static_cast<double>(i) + 0.5) / bins;
    const double middle = histogram.low * (1 - part) + histogram.high * part;
    // Halves, because the distance of two large doubles may overflow.
    const double place = low < high ? (middle / 2 - low / 2) / (high / 2 - low / 2) : 0;
    const auto bin = static_cast<std::size_t>(std::clamp(place, 0.0, 1.0) * static_cast<double>(counts.size()));
    counts[std::min(bin, counts.size() - 1)] += histogram.counts[i];
  }
}

Config exact_number(const Config& value) {
  return value.type() == Config::Type::real ? inspect::json_number(value.as_double()) : value;
}

double magnitude(const TensorStatistics& one) {
  return one.finite() == 0 ? 0 : std::max(std::abs(one.minimum.as_double()), std::abs(one.maximum.as_double()));
}

/// Names the members of a row that differ from the others: the row itself would hide them.
ConfigArray outliers_of(const Row& row, const std::vector<TensorStatistics>& all) {
  constexpr std::size_t most = 3;  // per reason
  ConfigArray outliers;
  if (row.members.size() == 1) return outliers;
  const auto add = [&](std::size_t member, const char* reason) {
    outliers.push_back(Config::object({{"name", all[member].tensor.name}, {"reason", reason}}));
  };
  const auto add_first = [&](const char* reason, const auto& is_outlier) {
    std::size_t found = 0;
    for (const std::size_t member : row.members)
      if (found < most && is_outlier(all[member])) {
        add(member, reason);
        ++found;
      }
  };
  add_first("nan", [](const TensorStatistics& one) { return one.nans != 0; });
  add_first("infinite", [](const TensorStatistics& one) { return one.infinities != 0; });
  add_first("zero", [](const TensorStatistics& one) { return one.values != 0 && one.zeros == one.values; });
  add(*std::ranges::max_element(row.members, {}, [&](std::size_t member) { return magnitude(all[member]); }),
      "largest");
  return outliers;
}

/// The columns of the values, row by row.
struct ValueColumns {
  ConfigArray values, nans, infinities, zeros, minimum, maximum, mean, deviation, histogram, outliers;

  void add(const Row& row, const std::vector<TensorStatistics>& all) {
    PooledStatistics pooled;
    for (const std::size_t member : row.members) pooled.add(all[member]);
    const bool is_single = row.members.size() == 1;
    const TensorStatistics& first = all[row.members.front()];
    outliers.emplace_back(outliers_of(row, all));
    values.emplace_back(pooled.values());
    nans.emplace_back(pooled.nans());
    infinities.emplace_back(pooled.infinities());
    zeros.emplace_back(pooled.zeros());
    minimum.push_back(exact_number(pooled.minimum()));
    maximum.push_back(exact_number(pooled.maximum()));
    if (!pooled.has_numbers()) {
      mean.emplace_back();
      deviation.emplace_back();
      histogram.emplace_back(ConfigArray());
      return;
    }
    // The statistics of a single tensor are not computed again, so they are those of `muster stats`.
    mean.push_back(inspect::json_number(is_single ? first.mean : pooled.mean()));
    deviation.push_back(inspect::json_number(is_single ? first.deviation : pooled.deviation()));
    std::vector<std::uint64_t> counts = first.histogram.counts;
    if (!is_single) {
      std::size_t bins = 1;
      for (const std::size_t member : row.members) bins = std::max(bins, all[member].histogram.counts.size());
      counts.assign(bins, 0);
      for (const std::size_t member : row.members)
        add_counts(counts, all[member].histogram, pooled.minimum().as_double(), pooled.maximum().as_double());
    }
    histogram.emplace_back(ConfigArray(counts.begin(), counts.end()));
  }

  void move_to(Config& rows) {
    rows["values"] = std::move(values);
    rows["nans"] = std::move(nans);
    rows["infinities"] = std::move(infinities);
    rows["zeros"] = std::move(zeros);
    rows["minimum"] = std::move(minimum);
    rows["maximum"] = std::move(maximum);
    rows["mean"] = std::move(mean);
    rows["deviation"] = std::move(deviation);
    rows["histogram"] = std::move(histogram);
    rows["outliers"] = std::move(outliers);
  }
};

/// Returns the index of each selected tensor's file, or null.
std::vector<Config> files_of(const Source& source, const std::vector<std::size_t>& chosen) {
  std::unordered_map<std::string_view, std::size_t> known;
  for (std::size_t i = 0; i < source.files.size(); ++i) known.emplace(source.files[i].path, i);
  std::vector<Config> files;
  for (const std::size_t tensor : chosen) {
    const auto found = known.find(source.tensors->detail(tensor).file);
    files.push_back(found == known.end() ? Config() : Config(found->second));
  }
  return files;
}

/// Returns what get() returns for all members of a row if it is the same, otherwise null.
template <class Get>
Config common(const Row& row, const Get& get) {
  const Config first = get(row.members.front());
  const bool is_same = std::ranges::all_of(row.members, [&](std::size_t member) { return get(member) == first; });
  return is_same ? first : Config();
}

Config rows_tree(const Source& source, const std::vector<std::size_t>& chosen,
                 const std::vector<TensorStatistics>* statistics) {
  const std::vector<TensorEntry>& entries = source.entries();
  std::vector<std::string_view> names;
  for (const std::size_t tensor : chosen) names.emplace_back(entries[tensor].name);
  const std::vector<Config> files = files_of(source, chosen);
  const auto entry_of = [&](std::size_t member) -> const TensorEntry& { return entries[chosen[member]]; };
  ConfigArray name, tensors, bytes, dtype, shape, file;
  ValueColumns columns;
  for (const Row& row : rows_of(names)) {
    std::uint64_t sum = 0;
    for (const std::size_t member : row.members) sum += entry_of(member).bytes;
    name.emplace_back(row.name);
    tensors.emplace_back(row.members.size());
    bytes.emplace_back(sum);
    dtype.push_back(common(row, [&](std::size_t member) { return Config(to_string(entry_of(member).dtype)); }));
    shape.push_back(common(row, [&](std::size_t member) { return inspect::extents_of(entry_of(member).shape); }));
    file.push_back(common(row, [&](std::size_t member) { return files[member]; }));
    if (statistics != nullptr) columns.add(row, *statistics);
  }
  Config rows = Config::object({{"name", std::move(name)},
                                {"tensors", std::move(tensors)},
                                {"bytes", std::move(bytes)},
                                {"dtype", std::move(dtype)},
                                {"shape", std::move(shape)},
                                {"file", std::move(file)}});
  if (statistics != nullptr) columns.move_to(rows);
  return rows;
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

Config metadata_tree(const Source& source) {
  Config tree = Config::object();
  for (const auto& [key, value] : source.metadata)
    tree[is_utf8(key) ? key : inspect::printable(key)] = value.size() > longest_metadata ? Config() : Config(value);
  return tree;
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
    section["verify"] = inspect::verify_tree(verify(source.path, wanted));
  } catch (const Error& error) {
    section["verify_error"] = error.what();
  }
}

/// Adds "issues" and "issues_left_out".
void add_issues(Config& section, std::vector<SourceIssue> issues) {
  section["issues_left_out"] = issues.size() - std::min(issues.size(), most_issues);
  issues.resize(std::min(issues.size(), most_issues));
  section["issues"] = inspect::list_of(issues, [](const SourceIssue& issue) {
    return Config::object(
        {{"kind", issue.kind}, {"tensor", inspect::or_null(issue.tensor)}, {"message", issue.message}});
  });
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
    if (bytes <= longest_config) section["config"] = *config;
  } catch (const Error& error) {
    issues.push_back({"config", "", error.what()});
  }
}

Config parts_tree(const Source& source, const ReportOptions& options) {
  if (options.layout) return cut_parts(options.source, source.path, *options.layout);
  std::optional<Config> parts = joined_parts(*source.tensors);
  if (!parts) return {};
  for (const auto& [key, value] : source.facts)
    if (key == "layout" || key == "plan" || key == "ranks") (*parts)[key] = value;
  return std::move(*parts);
}

}  // namespace

Config model_section(Source source, const ReportOptions& options) {
  const std::vector<std::size_t> chosen = matching(source, options.filter);
  std::optional<std::vector<TensorStatistics>> statistics;
  if (options.has_values) statistics = inspect::statistics(*source.tensors, chosen, options.bins, options.progress);
  std::uint64_t bytes = 0;
  for (const std::size_t tensor : chosen) bytes += source.entries()[tensor].bytes;
  ConfigObject facts;
  for (const auto& [key, value] : source.facts) facts.insert(key, value);
  std::vector<SourceIssue> issues = inspect::find_issues(source);
  Config section = Config::object(
      {{"section", "model"},
       {"path", source.path},
       {"kind", source.kind},
       {"facts", std::move(facts)},
       {"tensors", chosen.size()},
       {"bytes", bytes},
       {"not_readable", count_lost(source.tensors->omissions())},
       {"not_selected", source.entries().size() - chosen.size()},
       {"metadata", metadata_tree(source)},
       {"files", inspect::list_of(
                     source.files,
                     [](const SourceFile& file) {
                       return Config::object({{"path", file.path}, {"tensors", file.tensors}, {"bytes", file.bytes}});
                     })},
       {"dtypes", dtypes_tree(source, chosen)},
       {"has_values", options.has_values},
       {"rows", rows_tree(source, chosen, statistics ? &*statistics : nullptr)}});
  add_verification(section, source, options);
  add_config(section, source, issues);
  add_issues(section, std::move(issues));
  section["parts"] = parts_tree(source, options);
  return section;
}

}  // namespace muster::report

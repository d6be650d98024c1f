// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "src/inspect/elements.hpp"
#include "src/inspect/reports.hpp"
#include "src/report/rows.hpp"
#include "src/report/sections.hpp"

namespace muster::report {
namespace {

/// The kinds of a row, the most important first. A row of several tensors has the first kind that one of them has.
constexpr std::string_view same_values = "same";
constexpr std::array kinds = {inspect::other_type, inspect::only_in_a, inspect::only_in_b, inspect::other_values,
                              same_values};

std::size_t place_of(std::string_view kind) {
  return static_cast<std::size_t>(std::ranges::find(kinds, kind) - kinds.begin());
}

/// The comparison of one tensor.
struct ComparedTensor {
  std::string_view name;
  std::uint64_t bytes = 0;
  std::uint64_t values = 0;
  const Config* difference = nullptr;  ///< an item of "tensor_differences"; null if the tensors are equal
  Config type = {};                    ///< of equal tensors

  [[nodiscard]] std::string_view kind() const {
    return difference == nullptr ? same_values : std::string_view(difference->at("kind").as_string());
  }
  [[nodiscard]] bool is_compared() const { return kind() == same_values || kind() == inspect::other_values; }
  [[nodiscard]] Config side(const char* key) const {
    if (difference == nullptr) return type;
    const Config* value = difference->as_object().find(key);
    return value == nullptr ? Config() : *value;
  }
  [[nodiscard]] std::uint64_t count(const char* key) const {
    if (difference == nullptr) return 0;
    return difference->at(key).as_uint();
  }
  [[nodiscard]] double distance(const char* key) const {
    return difference == nullptr ? 0 : inspect::distance_of(*difference, key);
  }
};

/// Returns the tensors of both sides, each name once.
std::vector<ComparedTensor> compared_tensors(const Source& a, const Source& b, const ConfigArray& differences) {
  std::unordered_map<std::string_view, const Config*> different;
  for (const Config& item : differences) different.emplace(item.at("name").as_string(), &item);
  std::unordered_map<std::string_view, const TensorEntry*> in_a;
  std::vector<ComparedTensor> all;
  const auto add = [&](const TensorEntry& entry) {
    const auto found = different.find(entry.name);
    all.push_back(
        {.name = entry.name,
         .bytes = entry.bytes,
         .values = static_cast<std::uint64_t>(element_count(entry.shape)) * inspect::values_per_element(entry.dtype),
         .difference = found == different.end() ? nullptr : found->second,
         .type = to_string(TensorSpec{entry.dtype, entry.shape})});
  };
  for (const TensorEntry& entry : a.entries()) {
    in_a.emplace(entry.name, &entry);
    add(entry);
  }
  for (const TensorEntry& entry : b.entries())
    if (!in_a.contains(entry.name)) add(entry);
  return all;
}

Config rows_tree(const std::vector<ComparedTensor>& all) {
  std::vector<std::string_view> names;
  for (const ComparedTensor& tensor : all) names.push_back(tensor.name);
  ConfigArray name, tensors, bytes, kind, a, b, different, compared, differing, nans, absolute, relative;
  for (const Row& row : rows_of(names)) {
    std::size_t first_kind = kinds.size() - 1;
    std::uint64_t sum_of_bytes = 0, sum_of_values = 0, sum_of_differing = 0, sum_of_nans = 0, changed = 0;
    double largest_absolute = 0;
    double largest_relative = 0;
    bool any = false;
    for (const std::size_t member : row.members) {
      const ComparedTensor& tensor = all[member];
      first_kind = std::min(first_kind, place_of(tensor.kind()));
      sum_of_bytes += tensor.bytes;
      changed += tensor.difference == nullptr ? 0 : 1;
      if (!tensor.is_compared()) continue;
      any = true;
      sum_of_values += tensor.values;
      sum_of_differing += tensor.count("differing");
      sum_of_nans += tensor.count("nans");
      largest_absolute = std::max(largest_absolute, tensor.distance("absolute"));
      largest_relative = std::max(largest_relative, tensor.distance("relative"));
    }
    const auto common = [&](const char* side) {
      return common_value(row, [&](std::size_t member) { return all[member].side(side); });
    };
    const auto if_any = [&](const Config& value) { return any ? value : Config(); };
    name.emplace_back(row.name);
    tensors.emplace_back(row.members.size());
    bytes.emplace_back(sum_of_bytes);
    kind.emplace_back(kinds[first_kind]);
    a.push_back(common("a"));
    b.push_back(common("b"));
    different.emplace_back(changed);
    compared.push_back(if_any(sum_of_values));
    differing.push_back(if_any(sum_of_differing));
    nans.push_back(if_any(sum_of_nans));
    absolute.push_back(if_any(inspect::json_number(largest_absolute)));
    relative.push_back(if_any(inspect::json_number(largest_relative)));
  }
  return Config::object({{"name", std::move(name)},
                         {"tensors", std::move(tensors)},
                         {"bytes", std::move(bytes)},
                         {"kind", std::move(kind)},
                         {"a", std::move(a)},
                         {"b", std::move(b)},
                         {"different", std::move(different)},
                         {"compared", std::move(compared)},
                         {"differing", std::move(differing)},
                         {"nans", std::move(nans)},
                         {"absolute", std::move(absolute)},
                         {"relative", std::move(relative)}});
}

}  // namespace

Config diff_section(const std::string& a, const std::string& b, const ReportOptions& options) {
  Source left = open_source(a, options.source);
  Source right = open_source(b, options.source);
  narrow(left, options.filter);
  narrow(right, options.filter);
  const Config report = inspect::diff_sources(left, right, options.source, options.filter, options.progress);
  const ConfigArray& differences = report.at("tensor_differences").as_array();
  Config section = Config::object({{"section", "diff"}});
  for (const auto& [key, value] : report.as_object())
    if (key != "tensor_differences") section[key] = value;
  for (const char* list : {"file_differences", "config_differences", "left_out_a", "left_out_b"})
    limit_list(section, list);
  section["different_tensors"] = differences.size();
  section["rows"] = rows_tree(compared_tensors(left, right, differences));
  return section;
}

}  // namespace muster::report

// SPDX-License-Identifier: Apache-2.0
#include "src/report/rows.hpp"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

namespace muster::report {
namespace {

constexpr std::string_view separators = "./";

/// Calls use(part) for each part of a name; the separator after a part belongs to it.
template <class Use>
void for_each_part(std::string_view name, const Use& use) {
  while (!name.empty()) {
    const std::size_t end = name.find_first_of(separators);
    const std::size_t length = end == std::string_view::npos ? name.size() : end + 1;
    use(name.substr(0, length));
    name.remove_prefix(length);
  }
}

std::string_view without_separator(std::string_view part) {
  return separators.find(part.back()) == std::string_view::npos ? part : part.substr(0, part.size() - 1);
}

bool is_number(std::string_view part) {
  const std::string_view text = without_separator(part);
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

std::size_t count_numbers(std::string_view name) {
  std::size_t count = 0;
  for_each_part(name, [&](std::string_view part) { count += is_number(part) ? 1 : 0; });
  return count;
}

std::size_t count_parts(std::string_view name) {
  std::size_t count = 0;
  for_each_part(name, [&](std::string_view) { ++count; });
  return count;
}

/// Returns the first `depth` parts of a name and "**", or the whole name if it has no more parts.
std::string module_of(std::string_view name, std::size_t depth) {
  std::string out;
  std::size_t part_number = 0;
  for_each_part(name, [&](std::string_view part) {
    if (part_number++ < depth) out += part;
  });
  return part_number > depth ? out + "**" : out;
}

std::vector<Row> grouped(const std::vector<std::string_view>& names,
                         const std::function<std::string(std::string_view)>& key_of) {
  std::vector<Row> rows;
  std::unordered_map<std::string, std::size_t> known;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::string key = key_of(names[i]);
    const auto [found, is_new] = known.try_emplace(key, rows.size());
    if (is_new) rows.push_back({std::move(key), {}});
    rows[found->second].members.push_back(i);
  }
  // A pattern that only one tensor has is that tensor.
  for (Row& row : rows)
    if (row.members.size() == 1) row.name = names[row.members.front()];
  return rows;
}

/// Returns the length of a name in the page, where some characters are escaped.
std::size_t cost_of(std::string_view name) {
  constexpr std::size_t escape = 6;
  std::size_t cost = 0;
  for (const char c : name)
    cost += c == '<' || c == '>' || c == '&' || static_cast<unsigned char>(c) < ' ' ? escape : 1;
  return cost;
}

bool fits(const std::vector<Row>& rows, const RowLimits& limits) {
  if (rows.size() > limits.rows) return false;
  std::size_t bytes = 0;
  for (const Row& row : rows) bytes += cost_of(row.name);
  return bytes <= limits.name_bytes;
}

template <class Count>
std::size_t largest(const std::vector<std::string_view>& names, const Count& count) {
  std::size_t most = 0;
  for (const std::string_view name : names) most = std::max(most, count(name));
  return most;
}

}  // namespace

std::string name_pattern(std::string_view name, std::size_t kept) {
  std::string out;
  std::size_t numbers = 0;
  constexpr std::string_view rank = "rank";
  if (name.starts_with(rank) && name.find('/') != std::string_view::npos &&
      is_number(name.substr(rank.size(), name.find('/') - rank.size() + 1))) {
    out = "rank*/";
    name.remove_prefix(name.find('/') + 1);
  }
  for_each_part(name, [&](std::string_view part) {
    if (!is_number(part) || numbers++ < kept) {
      out += part;
      return;
    }
    out += '*';
    out += part.substr(without_separator(part).size());
  });
  return out;
}

std::vector<Row> rows_of(const std::vector<std::string_view>& names, const RowLimits& limits) {
  std::vector<Row> rows;
  for (std::size_t i = 0; i < names.size(); ++i) rows.push_back({std::string(names[i]), {i}});
  if (fits(rows, limits)) return rows;
  // Names from files may have thousands of parts; beyond these depths nothing is gained by one more attempt.
  constexpr std::size_t most_numbers = 8;
  constexpr std::size_t most_parts = 32;
  for (std::size_t kept = std::min(largest(names, count_numbers), most_numbers); kept-- > 0;) {
    rows = grouped(names, [&](std::string_view name) { return name_pattern(name, kept); });
    if (fits(rows, limits)) return rows;
  }
  for (std::size_t depth = std::min(largest(names, count_parts), most_parts); depth-- > 1;) {
    rows = grouped(names, [&](std::string_view name) { return module_of(name_pattern(name, 0), depth); });
    if (fits(rows, limits)) return rows;
  }
  return grouped(names, [](std::string_view) { return std::string("**"); });
}

}  // namespace muster::report

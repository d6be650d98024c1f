// SPDX-License-Identifier: Apache-2.0
// Rows of a report: every tensor is in exactly one row, and the limits hold, whatever the names are.

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "src/report/rows.hpp"

using muster::report::name_pattern;
using muster::report::Row;
using muster::report::RowLimits;
using muster::report::rows_of;

namespace {

std::vector<Row> rows_of_names(const std::vector<std::string>& names, const RowLimits& limits) {
  const std::vector<std::string_view> views(names.begin(), names.end());
  return rows_of(views, limits);
}

std::vector<std::string> names_of(const std::vector<Row>& rows) {
  std::vector<std::string> names;
  for (const Row& row : rows) names.push_back(row.name);
  return names;
}

}  // namespace

TEST_CASE("numbers are whole parts of a name") {
  CHECK(name_pattern("layers.3.mlp.experts.17.w1.weight", 1) == "layers.3.mlp.experts.*.w1.weight");
  CHECK(name_pattern("layers.3.mlp.experts.17.w1.weight", 0) == "layers.*.mlp.experts.*.w1.weight");
  CHECK(name_pattern("rank0.4", 0) == "rank0.*");
  CHECK(name_pattern("rank12/layers.4.w", 1) == "rank*/layers.4.w");
  CHECK(name_pattern("ranking/4", 0) == "ranking/*");
  CHECK(name_pattern("..12./", 0) == "..*./");
  CHECK(name_pattern("", 0).empty());
}

TEST_CASE("experts are joined before layers, and layers before modules") {
  std::vector<std::string> names;
  for (const char* layer : {"0", "1"}) {
    names.push_back(std::string("layers.") + layer + ".norm");
    for (const char* expert : {"0", "1", "2"})
      for (const char* matrix : {"up", "down"})
        names.push_back(std::string("layers.") + layer + ".experts." + expert + "." + matrix);
  }
  names.emplace_back("head.weight");
  using Names = std::vector<std::string>;
  CHECK(rows_of_names(names, {.rows = 15}).size() == 15);
  CHECK(names_of(rows_of_names(names, {.rows = 14})) ==
        Names{"layers.0.norm", "layers.0.experts.*.up", "layers.0.experts.*.down", "layers.1.norm",
              "layers.1.experts.*.up", "layers.1.experts.*.down", "head.weight"});
  CHECK(names_of(rows_of_names(names, {.rows = 6})) ==
        Names{"layers.*.norm", "layers.*.experts.*.up", "layers.*.experts.*.down", "head.weight"});
  CHECK(names_of(rows_of_names(names, {.rows = 3})) == Names{"layers.*.norm", "layers.*.experts.*.**", "head.weight"});
  CHECK(names_of(rows_of_names(names, {.rows = 2})) == Names{"layers.*.**", "head.weight"});
  CHECK(names_of(rows_of_names(names, {.rows = 1})) == Names{"**"});
  CHECK(names_of(rows_of_names(names, {.name_bytes = 40})) == Names{"layers.*.**", "head.weight"});
}

TEST_CASE("every tensor is in one row, and the limits hold") {
  std::mt19937 random(1);
  const std::vector<std::string> parts = {"a", "layers", "0", "1", "22", "", "w1", std::string(50, 'x'), "*", "\xff"};
  for (int round = 0; round < 300; ++round) {
    std::set<std::string> unique;
    for (int i = 0; i < 60; ++i) {
      std::string name;
      for (unsigned part = random() % 6; part-- > 0;)
        name += parts[random() % parts.size()] + (random() % 4 ? "." : "/");
      unique.insert(name);
    }
    const std::vector<std::string> names(unique.begin(), unique.end());
    const RowLimits limits{.rows = 1 + random() % 40, .name_bytes = 100 + random() % 2000};
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
    const std::vector<Row> rows = rows_of_names(names, limits);
    for (const Row& row : rows) {
      members.insert(members.end(), row.members.begin(), row.members.end());
      bytes += row.name.size();
      if (row.members.size() == 1) CHECK(row.name == names[row.members.front()]);
    }
    std::ranges::sort(members);
    REQUIRE(members.size() == names.size());
    for (std::size_t i = 0; i < members.size(); ++i) CHECK(members[i] == i);
    CHECK(rows.size() <= limits.rows);
    if (rows.size() > 1) CHECK(bytes <= limits.name_bytes);
  }
}

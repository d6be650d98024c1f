// SPDX-License-Identifier: Apache-2.0
// Trees of names, tables, ages, and metadata converted to configs and back.

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/show.hpp"
#include "tests/support/random_config.hpp"

using namespace muster;
using namespace muster::inspect;

namespace {

std::vector<TensorEntry> entries_named(const std::vector<std::string>& names) {
  std::vector<TensorEntry> entries;
  for (const std::string& name : names) entries.push_back({name, DType::f32, {4}, 0, 16});
  return entries;
}

std::string text_of(const std::vector<NameNode>& nodes, int depth = 0) {
  std::string out;
  for (const NameNode& child : nodes) {
    out += std::string(static_cast<std::size_t>(depth), ' ') + std::string(child.label);
    if (child.alike > 1) out += " to " + std::string(child.last);
    out += (child.tensor ? "" : "/") + std::string("\n") + text_of(child.children, depth + 1);
  }
  return out;
}

std::string tree_of(const std::vector<TensorEntry>& entries, bool folds = true) {
  std::vector<std::size_t> places(entries.size());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
  return text_of(name_tree(entries, places, folds));
}

}  // namespace

TEST_CASE("names form a tree that combines equal branches") {
  CHECK(tree_of(entries_named({"a.b.c", "a.b.d", "e"})) == "a.b/\n c\n d\ne\n");
  CHECK(tree_of(entries_named({"h.0.w", "h.0.b", "h.1.w", "h.1.b", "h.2.w"})) == "h/\n 0 to 1/\n  w\n  b\n 2.w\n");
  CHECK(tree_of(entries_named({"h.0.w", "h.1.w"}), false) == "h/\n 0.w\n 1.w\n");
  CHECK(tree_of(entries_named({"rank0/w", "rank1/w"})) == "rank0/w to 1\n");
  // A tensor's name may be a prefix of other names.
  CHECK(tree_of(entries_named({"a", "a.b"})) == "a\n b\n");
  CHECK(tree_of(entries_named({"", ".", "x..y"})) == "\n \nx..y\n");
  std::vector<TensorEntry> other = entries_named({"h.0.w", "h.1.w"});
  other[1].shape = {2, 2};
  CHECK(tree_of(other) == "h/\n 0.w\n 1.w\n");
  // A name of many dots must not cause deep recursion.
  CHECK(tree_of(entries_named({std::string(100'000, '.'), "a"})).size() > 100'000);
}

TEST_CASE("tables fit a width by truncating the column that allows it") {
  TextTable table({{"NAME"}, {"SIZE", Align::right}}, {0});
  table.add({"short", "1 B"});
  table.add({"a.very.long.name.indeed", "20 B"});
  std::string whole;
  table.append_to(whole, {});
  CHECK(whole == "NAME                     SIZE\nshort                     1 B\na.very.long.name.indeed  20 B\n");
  std::string cut;
  table.append_to(cut, {.width = 20});
  CHECK(cut == "NAME            SIZE\nshort            1 B\na.v...e.indeed  20 B\n");
  // Names that would become equal are not truncated.
  table.add({"a.verily.longer.name.indeed", "3 B"});
  std::string apart;
  table.append_to(apart, {.width = 20});
  CHECK(apart ==
        "NAME            SIZE\nshort            1 B\na.very.long.name.indeed\n                20 B\n"
        "a.verily.longer.name.indeed\n                 3 B\n");
  TextTable two({{"NAME"}, {"FROM"}, {"IN"}}, {0, 1});
  two.add({"a.long.name.here", "from.somewhere.else", "x"});
  std::string both;
  two.append_to(both, {.width = 31});
  CHECK(both == "NAME          FROM           IN\na.l...e.here  fro...re.else  x\n");
}

TEST_CASE("ages use ordinary units") {
  using std::chrono::seconds;
  CHECK(age_text(seconds(-5)) == "now");
  CHECK(age_text(seconds(119)) == "119 s");
  CHECK(age_text(seconds(120)) == "2 min");
  CHECK(age_text(seconds(3 * 3600)) == "3 h");
  CHECK(age_text(seconds(3 * 86400)) == "3 d");
  CHECK(parse_age("90") == seconds(90));
  CHECK(parse_age("30min") == seconds(1800));
  CHECK(parse_age("2d") == seconds(2 * 86400));
  CHECK(parse_age("1w") == seconds(7 * 86400));
  for (const char* bad : {"", "d", "-1d", "2 d", "2m", "99999999999999999999d", "9000000000000d"})
    CHECK_THROWS_AS(parse_age(bad), Error);
}

TEST_CASE("metadata become a config and are restored, and configs become metadata") {
  const auto there = [](const Metadata& metadata) { return metadata_from_config(config_from_metadata(metadata)); };
  for (const Metadata& metadata :
       std::vector<Metadata>{{},
                             {{"format", "pt"}},
                             {{"muster.config", "{\"a\":1}"}},
                             {{"muster.config", "no JSON"}},
                             {{"muster.config", "null"}},
                             {{"muster.config", "{\"metadata\":{\"a\":\"b\"}}"}},
                             {{"muster.config", "{\"a\":1}"}, {"format", "pt"}},
                             {{"muster.config", "{\"metadata\":{\"muster.config\":\"1\"}}"}}})
    CHECK(there(metadata) == metadata);
  CHECK(config_from_metadata({{"muster.config", "{\"a\":1}"}}) == Config::object({{"a", 1}}));
  CHECK(config_from_metadata({{"format", "pt"}}) == Config::object({{"metadata", Config::object({{"format", "pt"}})}}));
  const auto back = [](const Config& config) { return config_from_metadata(metadata_from_config(config)) == config; };
  CHECK(back(Config()));
  CHECK(back(Config::object()));
  CHECK(back(Config::object({{"metadata", Config::object()}})));
  CHECK(back(Config::object({{"metadata", Config::object({{"a", "b"}})}})));
  CHECK(back(Config::object({{"metadata", Config::object({{"a", 1}})}})));
  CHECK(back(Config::object({{"metadata", Config::object({{"muster.config", "{\"a\":1}"}})}})));
  CHECK(back(Config::object({{"metadata", Config::object({{"muster.config", "{\"metadata\":{\"x\":\"y\"}}"}})}})));
  CHECK(back("text"));
  test::RandomConfig random(5, false);
  for (int i = 0; i < 300; ++i) {
    const Config config = random.tree(3);
    CHECK(back(config));
    CHECK(back(Config::object({{"metadata", config}})));
  }
}

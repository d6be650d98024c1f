// SPDX-License-Identifier: Apache-2.0
// Numbers in names, and new names, both ways.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::words_of;

namespace {

MergePlan plan_of(const std::string& rules) {
  return MergePlan::parse(R"({"muster_plan": 1, "rules": [)" + rules + "]}", "p.json");
}

std::string renamed(const MergePlan& plan, std::string_view name) {
  const MergeRule* rule = plan.find(name);
  REQUIRE(rule != nullptr);
  return MergePlan::renamed(*rule, name);
}

}  // namespace

TEST_CASE("a number pattern finds the first place that fits, and nothing that is no number") {
  const NumberPattern layers = NumberPattern::parse("*layers.#.*");
  CHECK(layers.find("model.layers.11.mlp.weight") == 11);
  CHECK(layers.find("layers.0.x") == 0);
  CHECK(layers.find("a.layers.3.layers.4.b") == 3);
  CHECK(layers.find("a.layers.x.layers.4.b") == 4);
  CHECK(layers.find("model.layers.999999999999999999.w") == 999'999'999'999'999'999);
  for (const char* name : {"model.layers.1234567890123456789.w", "model.layers.007.w", "model.layers.-1.w", "layers.1",
                           "layers..w", "layers.1x.w", "model.norm.weight", ""})
    CHECK_FALSE(layers.find(name).has_value());
  CHECK(NumberPattern::parse("{h,blocks}.#.{attn,mlp}.*").find("blocks.7.mlp.w") == 7);
  CHECK_FALSE(NumberPattern::parse("{h,blocks}.#.{attn,mlp}.*").find("blocks.7.norm.w").has_value());
  CHECK(NumberPattern::parse("h.#").find("h.5") == 5);
  CHECK(NumberPattern::parse("a.b[#]").find("a.b[5]") == 5);
  CHECK_FALSE(NumberPattern::parse("a.b#").find("axb5").has_value());
  CHECK(NumberPattern::parse("*\xc3\xa4.#*").find("\xff\n\xc3\xa4.5") == 5);
}

TEST_CASE("replacing a number changes nothing else") {
  const NumberPattern layers = NumberPattern::parse("*layers.#.*");
  CHECK(layers.replace("model.layers.9.w", 10) == "model.layers.10.w");
  CHECK(layers.replace("layers.10.layers.4.x", 0) == "layers.0.layers.4.x");
  CHECK(NumberPattern::parse("#*").replace("3.w", 12) == "12.w");
  CHECK(NumberPattern::parse("*#").replace("w.3", 4) == "w.4");
  CHECK(has(words_of(ErrorKind::argument, [&] { (void)layers.replace("model.norm.weight", 1); }), "\"*layers.#.*\""));
}

TEST_CASE("number patterns that cannot be") {
  const auto error = [](const char* text) {
    return words_of(ErrorKind::argument, [&] { NumberPattern::parse(text); });
  };
  CHECK(has(error("layers"), "has 0 \"#\""));
  CHECK(has(error("#.#"), "has 2 \"#\""));
  CHECK(has(error("{a.#,b}"), "inside braces"));
  CHECK(has(error("{a,b.#}"), "inside braces"));
  CHECK(has(error("#{a"), "never closes"));
  CHECK(has(error(("#" + std::string(2000, 'a')).c_str()), "at most 1024"));
}

TEST_CASE("new names take over what stars and groups stand for") {
  const MergePlan plan = plan_of(
      R"json({"match": "decoder.layers.*.self_attention.linear_proj.*", "action": "concat", "dim": 1,
              "rename": "model.layers.$1.self_attn.o_proj.$2"},
             {"match": "swap.*-*", "action": "same", "rename": "swapped.$2-$1"},
             {"match": "price.*", "action": "same", "rename": "$$$1"},
             {"regex": "h\\.([0-9]+)\\.(w|b)", "action": "same", "rename": "layers.$1.$2"},
             {"match": "{q,k}.*.weight", "action": "same", "rename": "attn.$1.weight"},
             {"match": "*", "action": "same"})json");
  CHECK(renamed(plan, "decoder.layers.12.self_attention.linear_proj.weight") ==
        "model.layers.12.self_attn.o_proj.weight");
  CHECK(renamed(plan, "swap.a-b-c") == "swapped.b-c-a");
  CHECK(renamed(plan, "price.7") == "$7");
  CHECK(renamed(plan, "h.3.w") == "layers.3.w");
  CHECK(renamed(plan, "k.0.weight") == "attn.0.weight");
  CHECK(renamed(plan, "else") == "else");

  CHECK(plan.origin("model.layers.12.self_attn.o_proj.weight")->name ==
        "decoder.layers.12.self_attention.linear_proj.weight");
  CHECK(plan.origin("swapped.b-a")->name == "swap.a-b");
  CHECK(plan.origin("$7")->name == "price.7");
  CHECK(has(words_of(ErrorKind::argument, [&] { (void)plan.origin("layers.3.w"); }), "regular expression"));
  CHECK(has(words_of(ErrorKind::argument, [&] { (void)plan.origin("attn.0.weight"); }), "braces"));
  // The last rule keeps names, but not one that another rule would take from it.
  CHECK(plan.origin("else")->name == "else");
  CHECK_FALSE(plan.origin("price.7").has_value());
}

TEST_CASE("a star that the new name lacks has no way back") {
  const MergePlan plan =
      plan_of(R"({"match": "a.*.*", "action": "same", "rename": "b.$2"}, {"match": "c", "action": "drop"})");
  CHECK(has(words_of(ErrorKind::argument, [&] { (void)plan.origin("b.x"); }), "lacks a star"));
  const MergePlan twice = plan_of(R"({"match": "a.*", "action": "same", "rename": "$1.$1"})");
  CHECK(renamed(twice, "a.x") == "x.x");
  CHECK(has(words_of(ErrorKind::argument, [&] { (void)twice.origin("x.x"); }), "twice"));
  CHECK_FALSE(plan.origin("z").has_value());
  CHECK_FALSE(plan.origin("c").has_value());
}

TEST_CASE("new names that the pattern does not go with are refused when the plan is read") {
  const auto error = [](const std::string& rule) {
    return words_of(ErrorKind::corrupt, [&] { plan_of("\n\n" + rule); });
  };
  CHECK(has(error(R"({"match": "*.*", "action": "same", "rename": "$3"})"), "rule 1 (line 3)"));
  CHECK(has(error(R"({"match": "*.*", "action": "same", "rename": "$3"})"), "\"$3\", and its pattern has 2 stars"));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": "$0"})"), "\"$0\""));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": "$99999999999999999999"})"), "has 1 star"));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": "a$b"})"), "without a number"));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": ""})"), "an empty name"));
  CHECK(has(error(R"({"match": "{*,b}", "action": "same", "rename": "$1"})"), "different numbers"));
  CHECK(has(error(R"json({"regex": "(a)(?:b)", "action": "same", "rename": "$2"})json"), "has 1"));
  CHECK(has(error(R"({"match": "a", "action": "drop", "rename": "b"})"),
            "unknown key \"rename\" of the action \"drop\""));
}

TEST_CASE("what origin gives comes back by its rule, whatever stars stand for") {
  const MergePlan plan = plan_of(
      R"({"match": "a*b*", "action": "same", "rename": "$2a$1"}, {"match": "*a", "action": "same", "rename": "$1bb"},
         {"match": "b*", "action": "same"}, {"match": "*-*", "action": "same", "rename": "-$1-$2-"})");
  std::mt19937 random(7);
  int found = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string name;
    for (std::size_t length = random() % 7; length > 0; --length) name += "ab-"[random() % 3];
    CAPTURE(name);
    // Both ways of the round trip that shard and export take.
    if (const auto origin = plan.origin(name)) {
      ++found;
      CHECK(plan.find(origin->name) == origin->rule);
      CHECK(MergePlan::renamed(*origin->rule, origin->name) == name);
    }
    if (const MergeRule* rule = plan.find(name)) {
      const std::string result = MergePlan::renamed(*rule, name);
      const auto back = plan.origin(result);
      if (back) CHECK(renamed(plan, back->name) == result);
    }
  }
  CHECK(found > 1000);
}

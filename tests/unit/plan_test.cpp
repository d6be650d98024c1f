// SPDX-License-Identifier: Apache-2.0
// Plans: what they mean, and every way in which one is refused.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "muster/plan.hpp"

#include <doctest/doctest.h>

#include <string>

#include "muster/error.hpp"

using namespace muster;

namespace {

template <class Call>
std::string words_of(ErrorKind kind, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == kind);
    const std::string words = error.what();
    CHECK(words.find('\n') == std::string::npos);
    return words;
  }
  FAIL("nothing was thrown");
  return {};
}

bool has(const std::string& words, std::string_view part) {
  if (words.find(part) != std::string::npos) return true;
  MESSAGE("no \"" << std::string(part) << "\" in: " << words);
  return false;
}

std::string parse_error(std::string_view json) {
  return words_of(ErrorKind::corrupt, [&] { MergePlan::parse(json, "p.json"); });
}

MergePlan plan_of(const std::string& rules) {
  return MergePlan::parse(R"({"muster_plan": 1, "rules": [)" + rules + "]}", "p.json");
}

}  // namespace

TEST_CASE("the first rule that matches wins") {
  const MergePlan plan = plan_of(
      R"({"match": "*.bias", "action": "same"}, {"match": "a.*", "action": "concat", "dim": 1}, {"match": "*", "action": "first"})");
  CHECK(action_name(plan.find("a.bias")->action) == "same");
  CHECK(action_name(plan.find("a.weight")->action) == "concat");
  CHECK(std::get<ConcatAction>(plan.find("a.weight")->action).dim == 1);
  CHECK(action_name(plan.find("b.weight")->action) == "first");
}

TEST_CASE("globs match whole names: stars, words in braces, nothing else is special") {
  const auto matches = [](std::string_view glob, std::string_view name) {
    return TensorPattern::glob(std::string(glob)).matches(name);
  };
  CHECK(matches("*", ""));
  CHECK(matches("a", "a"));
  CHECK_FALSE(matches("a", "ab"));
  CHECK_FALSE(matches("b", "ab"));
  CHECK(matches("*.weight", "x.y.weight"));
  CHECK_FALSE(matches("*.weight", "x.y.weights"));
  CHECK(matches("a*b*c", "axxbyybzzc"));
  CHECK_FALSE(matches("a*b*c", "axxbyybzz"));
  CHECK(matches("l.{q,k}_proj.{weight,bias}", "l.k_proj.bias"));
  CHECK_FALSE(matches("l.{q,k}_proj.{weight,bias}", "l.v_proj.bias"));
  CHECK(matches("x{,.y}", "x"));
  CHECK(matches("x{,.y}", "x.y"));
  CHECK(matches("a.?[b]", "a.?[b]"));
  CHECK_FALSE(matches("a.b", "axb"));
}

TEST_CASE("regular expressions are anchored at both ends") {
  const MergePlan plan = plan_of(R"json({"regex": "h\\.[0-9]+\\.(w|b)", "action": "same"})json");
  CHECK(plan.find("h.12.w") != nullptr);
  CHECK(plan.find("h.12.wx") == nullptr);
  CHECK(plan.find("xh.12.w") == nullptr);
  CHECK(plan.find("h." + std::string(100'000, '1') + ".w") != nullptr);
}

TEST_CASE("regular expressions match whole names, in linear time") {
  const auto matches = [](std::string_view regex, std::string_view name) {
    return TensorPattern::regex(std::string(regex)).matches(name);
  };
  CHECK(matches("a|bc|", "bc"));
  CHECK_FALSE(matches("a\\.c", "abc"));
  CHECK_FALSE(matches("a", "ab"));
  CHECK(matches("(?:ab)+", "ababab"));
  CHECK(matches("[a-cx\\d_-]*", "abcx019_-"));
  // Where a matcher that backtracks would not come back.
  CHECK(matches("(a*)*b?", std::string(60, 'a')));
  CHECK_FALSE(matches("((a{0,9}){1,9}){1,9}", std::string(50, 'a') + "b"));
  for (const char* wrong : {"(", ")", "[", "[a", "*", "a{3,2}", "a{9999}", "\\", "\\1", "(?=a)", "[z-a]"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(TensorPattern::regex(wrong), Error);
  }
  CHECK_THROWS_AS(TensorPattern::regex(std::string(1000, '(')), Error);
  CHECK_THROWS_AS(TensorPattern::regex(std::string(2000, 'a')), Error);
}

TEST_CASE("a text that is no JSON is refused with line and column") {
  const std::string words = parse_error("{\"muster_plan\": 1,\n  \"rules\": [}");
  CHECK(has(words, "plan \"p.json\""));
  CHECK(has(words, "line 2"));
  CHECK(has(words, "column"));
}

TEST_CASE("a JSON text that is no plan is refused with the rule's number") {
  CHECK(has(parse_error("[]"), "a plan is a JSON object"));
  CHECK(has(parse_error(R"({"rules": []})"), "no \"muster_plan\": 1"));
  CHECK(has(parse_error(R"({"muster_plan": 1})"), "at least one rule"));
  CHECK(has(parse_error(R"({"muster_plan": 1, "rules": []})"), "at least one rule"));
  CHECK(has(parse_error(R"({"muster_plan": 1, "rule": []})"), "unknown key \"rule\""));
  CHECK(
      has(words_of(ErrorKind::version, [] { MergePlan::parse(R"({"muster_plan": 2, "rules": []})", "p"); }), "not 1"));

  const auto rule_error = [](const std::string& rule) {
    return parse_error(R"({"muster_plan": 1, "rules": [{"match": "a", "action": "same"}, )" + rule + "]}");
  };
  CHECK(has(rule_error("7"), "rule 2 (line 1): it is"));
  CHECK(has(rule_error(R"({"match": "b"})"), "rule 2 (line 1): it has no \"action\""));
  const std::string unknown = rule_error(R"({"match": "b", "action": "conct"})");
  CHECK(has(unknown, "rule 2 (line 1): unknown action \"conct\""));
  CHECK(has(unknown, "concat, same, first, max, sum, stack, scale, drop"));
  CHECK(has(rule_error(R"({"match": "b", "action": "same", "dim": 0})"), "unknown key \"dim\""));
  CHECK(has(rule_error(R"({"match": "b", "action": "concat"})"), "needs \"dim\""));
  CHECK(has(rule_error(R"({"match": "b", "action": "concat", "dim": "0"})"), "not an integer"));
  CHECK(has(rule_error(R"({"match": "b", "action": "concat", "dim": 99})"), "not an integer"));
  CHECK(has(rule_error(R"({"action": "same"})"), "either \"match\" (a glob) or \"regex\""));
  CHECK(has(rule_error(R"({"match": "b", "regex": "b", "action": "same"})"), "either \"match\" (a glob) or \"regex\""));
  CHECK(has(rule_error(R"({"match": 1, "action": "same"})"), "\"match\" is"));
  CHECK(has(rule_error(R"({"regex": "(", "action": "same"})"), "missing )"));
  CHECK(has(rule_error(R"({"match": "{a", "action": "same"})"), "never closes a brace"));
  CHECK(has(rule_error(R"({"match": "a}", "action": "same"})"), "never opened"));
  CHECK(has(rule_error(R"({"match": "{a{b}}", "action": "same"})"), "braces inside braces"));
  std::string many;
  for (int i = 0; i < 9; ++i) many += "{a,b}";
  CHECK(has(rule_error(R"({"match": ")" + many + R"(", "action": "same"})"), "more than 256 patterns"));
}

TEST_CASE("a plan that is neither built in nor a file is refused with the names that there are") {
  CHECK(has(words_of(ErrorKind::not_found, [] { MergePlan::load("lama"); }), "bert, gpt-neox, llama, moe and auto"));
}

TEST_CASE("the built-in plans know the names of their models") {
  const MergePlan llama = MergePlan::load("llama");
  const auto concat = [](const MergePlan& plan, std::string_view name, std::int64_t dim) {
    const MergeRule* rule = plan.find(name);
    CAPTURE(std::string(name));
    REQUIRE(rule != nullptr);
    REQUIRE(action_name(rule->action) == "concat");
    CHECK(std::get<ConcatAction>(rule->action).dim == dim);
  };
  const auto same = [](const MergePlan& plan, std::string_view name) {
    const MergeRule* rule = plan.find(name);
    CAPTURE(std::string(name));
    REQUIRE(rule != nullptr);
    CHECK(action_name(rule->action) == "same");
  };
  concat(llama, "model.embed_tokens.weight", 0);
  concat(llama, "lm_head.weight", 0);
  concat(llama, "model.layers.11.self_attn.q_proj.weight", 0);
  concat(llama, "model.layers.11.self_attn.k_proj.bias", 0);
  concat(llama, "model.layers.11.self_attn.o_proj.weight", 1);
  same(llama, "model.layers.11.self_attn.o_proj.bias");
  concat(llama, "model.layers.11.mlp.up_proj.weight", 0);
  concat(llama, "model.layers.11.mlp.down_proj.weight", 1);
  same(llama, "model.layers.11.input_layernorm.weight");
  same(llama, "model.layers.11.self_attn.q_norm.weight");
  same(llama, "model.norm.weight");
  same(llama, "model.layers.0.self_attn.rotary_emb.inv_freq");
  CHECK(llama.find("model.layers.0.block_sparse_moe.gate.weight") == nullptr);

  const MergePlan bert = MergePlan::load("bert");
  for (const std::string prefix : {"", "bert."}) {
    concat(bert, prefix + "embeddings.word_embeddings.weight", 0);
    same(bert, prefix + "embeddings.position_embeddings.weight");
    same(bert, prefix + "embeddings.token_type_embeddings.weight");
    same(bert, prefix + "embeddings.position_ids");
    same(bert, prefix + "embeddings.LayerNorm.bias");
    concat(bert, prefix + "encoder.layer.3.attention.self.query.bias", 0);
    concat(bert, prefix + "encoder.layer.3.attention.output.dense.weight", 1);
    same(bert, prefix + "encoder.layer.3.attention.output.dense.bias");
    same(bert, prefix + "encoder.layer.3.attention.output.LayerNorm.weight");
    concat(bert, prefix + "encoder.layer.3.intermediate.dense.weight", 0);
    concat(bert, prefix + "encoder.layer.3.output.dense.weight", 1);
    same(bert, prefix + "pooler.dense.weight");
  }
  concat(bert, "cls.predictions.decoder.weight", 0);
  concat(bert, "cls.predictions.bias", 0);
  same(bert, "cls.predictions.transform.LayerNorm.weight");
  same(bert, "cls.seq_relationship.weight");
}

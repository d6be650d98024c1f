// SPDX-License-Identifier: Apache-2.0
// Plans: their meaning, every way in which one is refused, numbers in names, and new names in both directions.

#include "muster/plan.hpp"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <string_view>

#include "muster/error.hpp"
#include "tests/support/plans.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::plan_of;
using test::words_of;

namespace {

std::string parse_error(std::string_view json) {
  return words_of(ErrorKind::corrupt, [&] { MergePlan::parse(json, "p.json"); });
}

std::string renamed(const MergePlan& plan, std::string_view name) {
  const MergeRule* rule = plan.find(name);
  REQUIRE(rule != nullptr);
  return MergePlan::renamed(*rule, name);
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

TEST_CASE("globs match whole names: stars, words in braces, and no other special characters") {
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
  // A matcher that backtracks would not return here.
  CHECK(matches("(a*)*b?", std::string(60, 'a')));
  CHECK_FALSE(matches("((a{0,9}){1,9}){1,9}", std::string(50, 'a') + "b"));
  for (const char* wrong : {"(", ")", "[", "[a", "*", "a{3,2}", "a{9999}", "\\", "\\1", "(?=a)", "[z-a]"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(TensorPattern::regex(wrong), Error);
  }
  CHECK_THROWS_AS(TensorPattern::regex(std::string(1000, '(')), Error);
  CHECK_THROWS_AS(TensorPattern::regex(std::string(2000, 'a')), Error);
}

TEST_CASE("a text that is not JSON is refused with line and column") {
  const std::string words = parse_error("{\"muster_plan\": 1,\n  \"rules\": [}");
  CHECK(has(words, "plan \"p.json\""));
  CHECK(has(words, "line 2"));
  CHECK(has(words, "column"));
}

TEST_CASE("one rule applies to all tensors of a linear layer") {
  const MergePlan plan = plan_of(R"({"match": "*.q", "action": "column", "heads": 4, "stage": "last"},
                                    {"match": "*.x.bias", "action": "drop"},
                                    {"match": "*.{o,x}", "action": "row", "blocks": [1, 2]})");
  const auto text_of = [&](const std::string& name) {
    const MergeRule* rule = plan.find(name);
    if (rule == nullptr) return std::string("none");
    std::string text = std::to_string(rule->number) + " " + std::string(action_name(rule->action));
    const auto add = [&](std::optional<std::int64_t> dim, const auto& action) {
      if (dim) text += " " + std::to_string(*dim);
      text += action.heads.empty() ? "" : " heads";
      text += action.blocks.empty() ? "" : " blocks";
    };
    if (const auto* concat = std::get_if<ConcatAction>(&rule->action)) add(concat->dim, *concat);
    if (const auto* scale = std::get_if<ScaleAction>(&rule->action)) add(scale->dim, *scale);
    return text + (rule->stage == Stage::last ? " last" : "");
  };
  CHECK(text_of("a.q.weight") == "1 concat 0 heads last");
  CHECK(text_of("a.q.bias") == "1 concat 0 heads last");
  CHECK(text_of("a.q.weight_scale_inv") == "1 scale 0 heads last");
  CHECK(text_of("a.q.input_quantizer._pre_quant_scale") == "1 same last");
  CHECK(text_of("a.q.input_quantizer._amax") == "1 scale last");
  CHECK(text_of("a.q.qzeros") == "1 concat 1 heads last");
  CHECK(text_of("a.q.weight_packed") == "1 concat 0 heads last");
  CHECK(text_of("a.q.g_idx") == "1 same last");
  CHECK(text_of("a.q.other") == "none");
  CHECK(text_of("a.o.weight") == "3 concat 1 blocks");
  CHECK(text_of("a.o.bias") == "3 same");
  CHECK(text_of("a.o.weight_quantizer._amax") == "3 scale 1 blocks");
  CHECK(text_of("a.o.pre_quant_scale") == "3 concat -1 blocks");
  CHECK(text_of("a.o.input_scale") == "3 scale -1");
  CHECK(text_of("a.o.output_scale") == "3 scale");
  CHECK(text_of("a.o.g_idx") == "3 concat 0 blocks");
  CHECK(text_of("a.o.scales") == "3 scale 0 blocks");
  CHECK(text_of("a.o.weight_packed") == "3 concat 1 blocks");
  CHECK(text_of("a.x.bias") == "2 drop");
  CHECK(text_of("a.x.weight") == "3 concat 1 blocks");
  const auto error = [](const std::string& rules) {
    return parse_error(R"({"muster_plan": 1, "rules": [)" + rules + "]}");
  };
  CHECK(has(error(R"({"regex": "q", "action": "column"})"), "rule 1 (line 1): unknown key \"regex\""));
  CHECK(has(error(R"({"action": "row"})"), "\"row\" needs \"match\""));
  CHECK(has(error(R"({"match": "q", "action": "row", "dim": 0})"), "unknown key \"dim\" of the action \"row\""));
  CHECK(has(error(R"({"match": "q", "action": "row", "blocks": [1]})"), "\"blocks\" is not a list"));
  CHECK(has(error(R"({"match": "q.*", "action": "same"}, {"match": "q", "action": "row"})"), "rule 2 (line 1)"));
}

TEST_CASE("a JSON text that is not a plan is refused with the rule's number") {
  CHECK(has(parse_error("[]"), "not a plan: it is"));
  CHECK(has(parse_error(R"({"rules": []})"), "not a plan: \"muster_plan\": 1 is missing"));
  CHECK(has(parse_error(R"({"muster_plan": 1})"), "at least one rule"));
  CHECK(has(parse_error(R"({"muster_plan": 1, "rules": []})"), "at least one rule"));
  CHECK(has(parse_error(R"({"muster_plan": 1, "rule": []})"), "unknown key \"rule\""));
  CHECK(
      has(words_of(ErrorKind::version, [] { MergePlan::parse(R"({"muster_plan": 2, "rules": []})", "p"); }), "not 1"));

  const auto rule_error = [](const std::string& rule) {
    return parse_error(R"({"muster_plan": 1, "rules": [{"match": "a", "action": "same"}, )" + rule + "]}");
  };
  CHECK(has(rule_error("7"), "rule 2 (line 1): it is"));
  CHECK(has(rule_error(R"({"match": "b"})"), "rule 2 (line 1): \"action\" is missing"));
  const std::string unknown = rule_error(R"({"match": "b", "action": "conct"})");
  CHECK(has(unknown, "rule 2 (line 1): unknown action \"conct\""));
  CHECK(has(unknown, "concat, same, first, max, sum, stack, scale, drop"));
  CHECK(has(rule_error(R"({"match": "b", "action": "same", "dim": 0})"), "unknown key \"dim\""));
  CHECK(has(rule_error(R"({"match": "b", "action": "concat"})"), "needs \"dim\""));
  CHECK(has(rule_error(R"({"match": "b", "action": "concat", "dim": "0"})"), "not an integer"));
  CHECK(has(rule_error(R"({"match": "b", "action": "concat", "dim": 99})"), "not an integer"));
  CHECK(has(rule_error(R"({"action": "same"})"), "exactly one of \"match\" (a glob) and \"regex\" is needed"));
  CHECK(has(rule_error(R"({"match": "b", "regex": "b", "action": "same"})"),
            "exactly one of \"match\" (a glob) and \"regex\" is needed"));
  CHECK(has(rule_error(R"({"match": 1, "action": "same"})"), "\"match\" is"));
  CHECK(has(rule_error(R"({"regex": "(", "action": "same"})"), "missing )"));
  CHECK(has(rule_error(R"({"match": "{a", "action": "same"})"), "a brace is not closed"));
  CHECK(has(rule_error(R"({"match": "a}", "action": "same"})"), "a brace is closed that was not opened"));
  CHECK(has(rule_error(R"({"match": "{a{b}}", "action": "same"})"), "nested braces"));
  std::string many;
  for (int i = 0; i < 9; ++i) many += "{a,b}";
  CHECK(has(rule_error(R"({"match": ")" + many + R"(", "action": "same"})"), "more than 256 patterns"));
}

TEST_CASE("a name that is neither a built-in plan nor a file is refused with the names of the plans") {
  CHECK(has(words_of(ErrorKind::not_found, [] { MergePlan::load("lama"); }), "vllm, whisper and auto"));
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

TEST_CASE("a number pattern finds the first position that matches, and only numbers") {
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
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)layers.replace("model.norm.weight", 1); }),
            "\"*layers.#.*\""));
}

TEST_CASE("invalid number patterns") {
  const auto error = [](const char* text) {
    return words_of(ErrorKind::invalid_argument, [&] { NumberPattern::parse(text); });
  };
  CHECK(has(error("layers"), "has 0 \"#\""));
  CHECK(has(error("#.#"), "has 2 \"#\""));
  CHECK(has(error("{a.#,b}"), "inside braces"));
  CHECK(has(error("{a,b.#}"), "inside braces"));
  CHECK(has(error("#{a"), "a brace is not closed"));
  CHECK(has(error(("#" + std::string(2000, 'a')).c_str()), "the limit is 1024"));
}

TEST_CASE("new names use the text that stars and groups match") {
  const MergePlan plan = plan_of(
      R"json({"match": "decoder.layers.*.self_attention.linear_proj.*", "action": "concat", "dim": 1,
              "rename": "model.layers.$1.self_attn.o_proj.$2"},
             {"match": "swap.*-*", "action": "same", "rename": "swapped.$2-$1"},
             {"match": "price.*", "action": "same", "rename": "$$$1"},
             {"regex": "h\\.([0-9]+)\\.(w|b)", "action": "same", "rename": "layers.$1.$2"},
             {"match": "{one}.*", "action": "same", "rename": "only.$1"},
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
  CHECK(plan.origin("only.x")->name == "one.x");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)plan.origin("layers.3.w"); }), "regular expression"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)plan.origin("attn.0.weight"); }), "braces"));
  // The last rule keeps names, except those that another rule would match.
  CHECK(plan.origin("else")->name == "else");
  CHECK_FALSE(plan.origin("price.7").has_value());
}

TEST_CASE("a star that the new name lacks cannot be inverted") {
  const MergePlan plan =
      plan_of(R"({"match": "a.*.*", "action": "same", "rename": "b.$2"}, {"match": "c", "action": "drop"})");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)plan.origin("b.x"); }), "lacks a star"));
  const MergePlan twice = plan_of(R"({"match": "a.*", "action": "same", "rename": "$1.$1"})");
  CHECK(renamed(twice, "a.x") == "x.x");
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)twice.origin("x.x"); }), "twice"));
  CHECK_FALSE(plan.origin("z").has_value());
  CHECK_FALSE(plan.origin("c").has_value());
}

TEST_CASE("new names that do not match the pattern are refused when the plan is read") {
  const auto error = [](const std::string& rule) {
    return words_of(ErrorKind::corrupt, [&] { plan_of("\n\n" + rule); });
  };
  CHECK(has(error(R"({"match": "*.*", "action": "same", "rename": "$3"})"), "rule 1 (line 3)"));
  CHECK(has(error(R"({"match": "*.*", "action": "same", "rename": "$3"})"), "\"$3\", but its pattern has 2 stars"));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": "$0"})"), "\"$0\""));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": "$99999999999999999999"})"), "has 1 star"));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": "a$b"})"), "without a number"));
  CHECK(has(error(R"({"match": "*", "action": "same", "rename": ""})"), "an empty name"));
  CHECK(has(error(R"({"match": "{*,b}", "action": "same", "rename": "$1"})"), "different numbers"));
  CHECK(has(error(R"json({"regex": "(a)(?:b)", "action": "same", "rename": "$2"})json"), "has 1"));
  CHECK(has(error(R"({"match": "a", "action": "drop", "rename": "b"})"),
            "unknown key \"rename\" of the action \"drop\""));
}

TEST_CASE("the name that origin returns is restored by its rule, whatever text the stars match") {
  const MergePlan plan = plan_of(
      R"({"match": "a*b*", "action": "same", "rename": "$2a$1"}, {"match": "*a", "action": "same", "rename": "$1bb"},
         {"match": "b*", "action": "same"}, {"match": "*-*", "action": "same", "rename": "-$1-$2-"})");
  std::mt19937 random(7);
  int found = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string name;
    for (std::size_t length = random() % 7; length > 0; --length) name += "ab-"[random() % 3];
    CAPTURE(name);
    // Both directions of the round trip of shard and export.
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

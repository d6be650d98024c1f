// SPDX-License-Identifier: Apache-2.0
// Rules for known shapes, numbers of config.json, the choice of a plan by config.json, and contradictory rules.

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "src/checkpoint/plan/plan_suggest.hpp"
#include "tests/support/plans.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::plan_of;
using test::words_of;

namespace {

std::string plan_error(const std::string& rules, const std::string& more = "") {
  return words_of(ErrorKind::corrupt, [&] {
    MergePlan::parse("{\"muster_plan\": 1, " + more + "\"rules\": [\n" + rules + "]}", "p.json");
  });
}

std::vector<TensorSpec> specs(Shape shape, std::size_t count = 2) {
  return std::vector<TensorSpec>(count, TensorSpec{DType::f32, std::move(shape)});
}

// A plan in a file, loaded with a config.
MergePlan load(const std::string& rules, const Config* config) {
  const test::TemporaryDirectory work;
  const std::string path = work / "plan.json";
  std::ofstream(path) << "{\"muster_plan\": 1, \"rules\": [" << rules << "]}";
  return MergePlan::load(path, config);
}

}  // namespace

TEST_CASE("plain actions resolve to their merge") {
  const MergePlan plan = plan_of(
      R"({"match": "c", "action": "concat", "dim": -2, "blocks": [2, 1, 1]}, {"match": "t", "action": "concat", "dim": 0, "trim": 50257},
         {"match": "s", "action": "same"}, {"match": "f", "action": "first"}, {"match": "m", "action": "max"},
         {"match": "a", "action": "sum"}, {"match": "k", "action": "stack"}, {"match": "d", "action": "drop"})");
  const auto resolve = [&](std::string_view name) { return plan.resolve(*plan.find(name), name, specs({4, 4})); };
  CHECK(resolve("c").merge == merge::concat_blocks(-2, {2, 1, 1}));
  CHECK(resolve("t").merge == merge::concat(0));
  CHECK(resolve("t").true_size == 50257);
  CHECK_FALSE(resolve("c").true_size.has_value());
  CHECK(plan.resolve(*plan.find("t"), "t", specs({50257, 4}, 1), true).true_size == 50257);
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] {
                       (void)plan.resolve(*plan.find("t"), "t", specs({50304, 4}, 1), true);
                     }),
            "is 50257, but the tensor has 50304"));
  CHECK(resolve("s").merge == merge::same());
  CHECK(resolve("f").merge == merge::first());
  CHECK(resolve("m").merge == merge::max());
  CHECK(resolve("a").merge == merge::sum());
  CHECK(resolve("k").merge == merge::stack());
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)resolve("d"); }), "rule 8 leaves the tensor out"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)plan.resolve(plan.rules()[0], "c", {}); }),
            "no rank has the tensor"));
  CHECK(plan.rules()[7].number == 8);
}

TEST_CASE("a scale is merged as the largest, cut or the same, depending on its shape") {
  const MergePlan plan = plan_of(
      R"({"match": "r", "action": "scale", "dim": 0}, {"match": "c", "action": "scale", "dim": 1},
         {"match": "l", "action": "scale", "dim": -1}, {"match": "n", "action": "scale"},
         {"match": "q", "action": "scale", "dim": 0, "blocks": [2, 1]})");
  const auto resolve = [&](std::string_view name, Shape shape, bool whole = false) {
    return plan.resolve(*plan.find(name), name, specs(std::move(shape), whole ? 1 : 3), whole).merge;
  };
  for (const char* name : {"r", "c", "l", "n", "q"}) {
    for (const Shape& one : {Shape{}, Shape{1}, Shape{1, 1}}) {
      CHECK(resolve(name, one) == merge::max());
      CHECK(resolve(name, one, true) == merge::same());
    }
  }
  for (const bool whole : {false, true}) {
    CHECK(resolve("r", {8}, whole) == merge::concat(0));
    CHECK(resolve("r", {8, 1}, whole) == merge::concat(0));
    CHECK(resolve("r", {1, 8}, whole) == merge::same());
    CHECK(resolve("c", {8}, whole) == merge::same());
    CHECK(resolve("c", {8, 1}, whole) == merge::same());
    CHECK(resolve("c", {8, 4}, whole) == merge::concat(1));
    CHECK(resolve("l", {8}, whole) == merge::concat(-1));
    CHECK(resolve("n", {8, 4}, whole) == merge::same());
    CHECK(resolve("q", {6}, whole) == merge::concat_blocks(0, {2, 1}));
    CHECK(resolve("r", {0}, whole) == merge::same());
  }
  // If the number of rows is not divisible, one rank has fewer rows than the others.
  const std::vector<TensorSpec> uneven = {{DType::f32, {2}}, {DType::f32, {1}}};
  CHECK(plan.resolve(*plan.find("r"), "r", uneven).merge == merge::concat(0));
}

TEST_CASE("numbers of config.json are looked up, and a missing one is named") {
  const std::string rules =
      R"({"match": "e", "action": "concat", "dim": 0, "trim": "vocab_size"},
         {"match": "q", "action": "concat", "dim": 0, "blocks": ["text_config.heads", 2]})";
  const Config config = parse_json(R"({"vocab_size": 96, "text_config": {"heads": 8}})");
  const MergePlan plan = load(rules, &config);
  CHECK(plan.resolve(*plan.find("e"), "e", specs({50, 4})).true_size == 96);
  CHECK(plan.resolve(*plan.find("q"), "q", specs({50, 4})).merge == merge::concat_blocks(0, {8, 2}));

  const auto error = [&](const char* json) {
    const Config other = parse_json(json);
    const MergePlan without = load(rules, &other);
    return words_of(ErrorKind::invalid_argument, [&] {
      (void)without.resolve(*without.find("e"), "e", specs({50, 4}));
    });
  };
  CHECK(has(error("{}"), "rule 1: \"vocab_size\" of config.json is needed, but the key is missing"));
  CHECK(has(error("[]"), "the key is missing"));
  CHECK(has(error(R"({"vocab_size": null})"), "the key is missing"));
  CHECK(has(error(R"({"vocab_size": "96"})"), "not an integer from 1"));
  CHECK(has(error(R"({"vocab_size": 0})"), "not an integer from 1"));
  CHECK(has(error(R"({"vocab_size": 9007199254740993})"), "not an integer from 1"));
  const MergePlan alone = load(rules, nullptr);
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)alone.resolve(*alone.find("q"), "q", specs({4})); }),
            "rule 2: \"text_config.heads\" of config.json is needed, but config.json does not exist"));
}

TEST_CASE("layers, experts, stages and axes are read") {
  const MergePlan plan = plan_of(
      R"({"match": "e", "action": "same", "stage": "ends"}, {"match": "n", "action": "same", "stage": "last"},
         {"match": "r", "action": "same", "stage": "all"}, {"match": "x*", "action": "concat", "dim": 0, "across": "expert"},
         {"match": "*", "action": "same", "stage": "first", "across": "tensor"})",
      R"("layers": {"match": "*layers.#.*", "renumber": true, "comment": 1}, "experts": "*experts.#.*", )");
  CHECK(plan.find("e")->stage == Stage::ends);
  CHECK(plan.find("n")->stage == Stage::last);
  CHECK(plan.find("r")->stage == Stage::all);
  CHECK(plan.find("x")->across == Axis::expert);
  CHECK(plan.find("y")->stage == Stage::first);
  CHECK(plan.find("y")->across == Axis::tensor);
  CHECK(plan.layers()->renumber);
  CHECK(plan.layers()->pattern.text() == "*layers.#.*");
  CHECK_FALSE(plan.experts()->renumber);
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] { (void)plan.resolve(*plan.find("x.experts.3.w"), "x.experts.3.w", specs({2})); }),
            "assigns it to one expert rank"));
  CHECK_FALSE(plan_of(R"({"match": "*", "action": "same"})").layers().has_value());

  const std::string rule = R"({"match": "*", "action": "same"})";
  CHECK(has(plan_error(rule, R"("layers": "*layers.*", )"), "\"layers\": malformed pattern"));
  CHECK(has(plan_error(rule, R"("layers": 3, )"), "neither a pattern nor an object"));
  CHECK(has(plan_error(rule, R"("experts": {"renumber": true}, )"), "\"experts\": \"match\" is missing"));
  CHECK(has(plan_error(rule, R"("experts": {"match": "#", "renumber": 1}, )"), "neither true nor false"));
  CHECK(has(plan_error(rule, R"("experts": {"match": "#", "from": 1}, )"), "unknown key \"from\""));
}

TEST_CASE("keys that do not belong to their action, and invalid values") {
  const auto rule_error = [](const std::string& keys) { return plan_error("\n{\"match\": \"a\", " + keys + "}"); };
  for (const char* action : {"same", "first", "max", "sum", "stack", "drop"}) {
    for (const char* key : {"\"dim\": 0", "\"blocks\": [1, 1]", "\"trim\": 5"})
      CHECK(has(rule_error("\"action\": \"" + std::string(action) + "\", " + key),
                " of the action \"" + std::string(action) + "\""));
  }
  CHECK(has(rule_error(R"("action": "scale", "dim": 0, "trim": 3)"), "unknown key \"trim\" of the action \"scale\""));
  CHECK(has(rule_error(R"("action": "drop", "stage": "all")"), "unknown key \"stage\""));
  CHECK(has(rule_error(R"("action": "drop", "across": "expert")"), "unknown key \"across\""));
  CHECK(has(rule_error(R"("action": "scale", "blocks": [1, 1])"), "\"blocks\" needs \"dim\""));
  const std::string concat = R"("action": "concat", "dim": 0, )";
  CHECK(has(rule_error(concat + R"("blocks": [1, 0])"), "neither an integer from 1"));
  CHECK(has(rule_error(concat + R"("blocks": [1, -2])"), "neither an integer from 1"));
  CHECK(has(rule_error(concat + R"("blocks": [1, ""])"), "neither an integer from 1"));
  CHECK(has(rule_error(concat + R"("blocks": [1, 1.5])"), "neither an integer from 1"));
  CHECK(has(rule_error(concat + R"("blocks": [4])"), "list of 2 to 64"));
  CHECK(has(rule_error(concat + R"("blocks": 4)"), "list of 2 to 64"));
  CHECK(has(rule_error(concat + R"("trim": 0)"), "\"trim\" has a value that is neither an integer from 1 to"));
  CHECK(has(rule_error(concat + R"("trim": 4, "blocks": [1, 1])"), "contradict each other"));
  CHECK(has(rule_error(concat + R"("heads": 4, "blocks": [1, 1])"), "\"heads\" and \"blocks\" contradict each other"));
  CHECK(has(rule_error(concat + R"("heads": 4, "trim": 4)"), "\"heads\" and \"trim\" contradict each other"));
  CHECK(has(rule_error(concat + R"("heads": 0)"), "\"heads\" has a value that is neither an integer from 1 to"));
  CHECK(has(rule_error(concat + R"("heads": [4])"), "\"heads\" is not a list of 2 to 64"));
  CHECK(has(rule_error(R"("action": "scale", "heads": 4)"), "\"heads\" needs \"dim\""));
  CHECK(has(rule_error(R"("action": "same", "heads": 4)"), "unknown key \"heads\" of the action \"same\""));
  CHECK(has(rule_error(R"("action": "same", "stage": "middle")"), "not one of first, last, ends, all"));
  CHECK(has(rule_error(R"("action": "same", "across": "pipeline")"), "not one of tensor, expert"));
  CHECK(has(rule_error(R"("action": "same", "across": 1)"), "\"across\" is"));
}

TEST_CASE("rules that no tensor can reach are reported, with both numbers and the line") {
  CHECK(has(plan_error("{\"match\": \"a*\", \"action\": \"same\"},\n\n{\"match\": \"a*\", \"action\": \"first\"}"),
            "rule 2 (line 4): the rule is never reached, because rule 1 has the same pattern"));
  CHECK(has(plan_error("{\"regex\": \"a+\", \"action\": \"same\"},\n{\"regex\": \"a+\", \"action\": \"first\"}"),
            "rule 2 (line 3): the rule is never reached, because rule 1 has the same pattern"));
  CHECK(has(plan_error("{\"match\": \"*\", \"action\": \"same\"},\n{\n\"match\": \"b\", \"action\": \"first\"}"),
            "rule 2 (line 3): the rule is never reached, because rule 1 matches all tensors"));
  CHECK(has(plan_error(R"({"match": "x{,*}**", "action": "same"}, {"match": "x.a", "action": "first"})"), "rule 2"));
  CHECK(has(plan_error(R"({"match": "{a,*}", "action": "same"}, {"regex": "b", "action": "first"})"),
            "matches all tensors"));
  CHECK(has(plan_error(R"({"regex": ".*", "action": "same"}, {"match": "b", "action": "first"})"),
            "matches all tensors"));
  CHECK(has(plan_error(R"({"match": "*.bias", "action": "same"}, {"match": "h.*.weight", "action": "same"},
                          {"match": "h.*.{weight,attn.bias}", "action": "first"})"),
            "rule 3 (line 3): pattern \"h.*.{weight,attn.bias}\" is never reached: rules 1, 2 match all its names"));
  // Patterns that overlap are valid, because the order of rules decides. So are patterns of which one only looks wider.
  CHECK_NOTHROW(plan_of(R"({"match": "*.bias", "action": "same"}, {"match": "a.*", "action": "first"},
                           {"match": "a*b*", "action": "first"}, {"match": "*b", "action": "first"},
                           {"regex": "a", "action": "same"}, {"match": "*", "action": "same"})"));
}

TEST_CASE("a plan may extend a built-in one") {
  const std::string rules = R"({"match": "*.adapter.weight", "action": "concat", "dim": 1},
      {"match": "*.self_attn.q_proj.*", "action": "same"}, {"match": "*norm.{weight,bias}", "action": "first"})";
  const MergePlan plan = plan_of(rules, R"("extends": "llama", )");
  const MergePlan llama = MergePlan::load("llama");
  CHECK(plan.find("layers.0.adapter.weight")->number == 1);
  CHECK(action_name(plan.find("layers.0.self_attn.q_proj.weight")->action) == "same");
  CHECK(action_name(plan.find("norm.weight")->action) == "first");
  CHECK(std::get<ConcatAction>(plan.find("layers.0.mlp.down_proj.weight")->action).dim == 1);
  CHECK(plan.layers()->pattern.text() == llama.layers()->pattern.text());
  // Seven rules for q_proj and one for norms are never reached.
  CHECK(plan.rules().size() == 3 + llama.rules().size() - 8);
  // The plan that shards store is complete, and does not depend on the built-in plan.
  const MergePlan again = MergePlan::parse(plan.text(), "again");
  CHECK(again.rules().size() == plan.rules().size());
  CHECK(again.text() == plan.text());
  CHECK(plan_of(rules, R"("extends": "llama", "layers": "h.#.*", )").layers()->pattern.text() == "h.#.*");
  CHECK(has(plan_error(rules, R"("extends": "lama", )"),
            "\"extends\" is \"lama\", which is neither a built-in plan (bert, falcon"));
  CHECK(has(plan_error(rules, R"("extends": 1, )"), "\"extends\" is"));
}

TEST_CASE("a plan may extend a plan in a file beside it") {
  const test::TemporaryDirectory folder;
  const auto write = [&](const std::string& name, const std::string& extends, const std::string& rules) {
    std::ofstream(folder / name) << R"({"muster_plan": 1, "extends": ")" << extends << R"(", "rules": [)" << rules
                                 << "]}";
  };
  write("base.json", "llama", R"({"match": "*.adapter.weight", "action": "concat", "dim": 1})");
  write("plan.json", "base.json", R"({"match": "*.other.weight", "action": "same"})");
  const MergePlan plan = MergePlan::load(folder / "plan.json");
  CHECK(plan.find("layers.0.other.weight")->number == 1);
  CHECK(plan.find("layers.0.adapter.weight")->number == 2);
  CHECK(plan.rules().size() == 2 + MergePlan::load("llama").rules().size());
  CHECK(MergePlan::parse(plan.text(), "again").rules().size() == plan.rules().size());
  const auto error = [&](const std::string& extends) {
    write("bad.json", extends, "");
    return words_of(ErrorKind::corrupt, [&] { MergePlan::load(folder / "bad.json"); });
  };
  CHECK(has(error("none.json"), "nor a file next to the plan"));
  CHECK(has(error("../" + folder.path().filename().string() + "/base.json"), "nor a file next to the plan"));
  CHECK(has(error("bad.json"), "plans extend each other in a circle"));
  // 4.json extends four files in a row, the last of which extends a built-in plan. bad.json would extend five.
  for (const auto& [name, extended] : {std::pair("1.json", "base.json"), {"2.json", "1.json"}, {"3.json", "2.json"}})
    write(name, extended, "");
  write("4.json", "3.json", R"({"match": "*.fourth", "action": "same"})");
  CHECK(MergePlan::load(folder / "4.json").find("layers.0.adapter.weight")->number == 2);
  CHECK(has(error("4.json"), "or more than 4 plans form a chain"));
  write("base.json", "llama", R"({"match": "*"})");
  CHECK(has(error("base.json"), "base.json\": rule 1 (line 1): \"action\" is missing"));
}

TEST_CASE("the search for such rules terminates, however many there are") {
  std::string rules;
  const std::string stars = "*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a";
  for (int i = 0; i < 10'000; ++i)
    rules += (i == 0 ? "" : ",\n") + ("{\"match\": \"" + stars + "x" + std::to_string(i) + "\", \"action\": \"same\"}");
  const auto begin = std::chrono::steady_clock::now();
  CHECK(plan_of(rules).rules().size() == 10'000);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
  std::string wide = "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}" + std::string(900, 'c');
  std::string many;
  for (int i = 0; i < 200; ++i)
    many += (i == 0 ? "" : ",\n") + ("{\"match\": \"" + wide + std::to_string(i) + "\", \"action\": \"same\"}");
  CHECK(has(plan_error(many), "the expanded braces of all patterns up to this one have more than 16777216 characters"));
}

TEST_CASE("auto selects the plan that matches config.json") {
  const auto plan = [](const char* json) {
    const Config config = parse_json(json);
    return MergePlan::load("auto", &config).name();
  };
  CHECK(plan(R"({"model_type": "qwen3"})") == "llama");
  CHECK(plan(R"({"architectures": ["Qwen3MoeForCausalLM"]})") == "moe");
  CHECK(plan(R"({"model_type": "llama", "architectures": ["MistralForCausalLM"]})") == "llama");
  CHECK(plan(R"({"model_type": "my_llama", "architectures": ["LlamaForCausalLM"]})") == "llama");
  CHECK(plan(R"({"model_type": "bert", "architectures": ["MyBertForAll"]})") == "bert");
  CHECK(plan(R"({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]})") == "gpt-neox");
  CHECK(plan(R"({"architectures": ["BertModel"]})") == "bert");
  CHECK(plan(R"({"architectures": ["BertLMHeadModel"]})") == "bert");

  const auto error = [](const char* json) {
    const Config config = parse_json(json);
    return words_of(ErrorKind::invalid_argument, [&] { MergePlan::load("auto", &config); });
  };
  const std::string both = error(R"({"model_type": "llama", "architectures": ["MixtralForCausalLM"]})");
  CHECK(has(both, "\"model_type\" \"llama\" requires the plan llama"));
  CHECK(has(both, "and \"architectures\" \"MixtralForCausalLM\" the plan moe"));
  CHECK(plan(R"({"model_type": "falcon", "new_decoder_architecture": true})") == "falcon");
  const std::string unknown = error(R"({"model_type": "qwen9", "architectures": ["Qwen9ForConditionalGeneration"]})");
  CHECK(has(unknown, "\"model_type\" \"qwen9\""));
  CHECK(has(unknown, "the most similar known model is qwen2 (plan llama)"));
  CHECK(has(error(R"({"model_type": "falcon", "multi_query": true})"),
            "is falcon with \"new_decoder_architecture\" (plan falcon)"));
  CHECK(has(error(R"({"architectures": ["Gemma4ForConditionalGeneration"]})"), "Run muster plan suggest"));
  CHECK(has(error(R"({"model_type": 3, "architectures": "x"})"), "neither \"model_type\" nor \"architectures\""));
  CHECK(has(error("[]"), "not an object"));
  CHECK(has(words_of(ErrorKind::invalid_argument, [] { MergePlan::load("auto"); }), "config.json does not exist"));
}

TEST_CASE("a suggested plan has a rule for every tensor, and marks uncertain ones") {
  const Config config = parse_json(R"({"model_type": "new", "hidden_size": 8, "vocab_size": 11})");
  const auto tensor = [](std::string name, Shape shape) {
    return NamedSpec{std::move(name), {DType::bf16, std::move(shape)}};
  };
  std::vector<NamedSpec> near = {tensor("model.embed_tokens.weight", {11, 8}), tensor("model.norm.weight", {8})};
  for (const char* layer : {"0", "1"}) {
    const std::string at = std::string("model.layers.") + layer + ".";
    near.push_back(tensor(at + "self_attn.q_proj.weight", {8, 8}));
    near.push_back(tensor(at + "self_attn.k_proj.weight", {8, 8}));
    near.push_back(tensor(at + "mlp.up_proj.weight", {12, 8}));
    near.push_back(tensor(at + "mlp.back.weight", {8, 12}));
    near.push_back(tensor(at + "mlp.mystery", {5, 3, 2}));
  }
  const SuggestedPlan extended = suggest_plan(near, &config);
  const Config plan = parse_json(extended.text);
  CHECK(plan.at("extends").as_string() == "llama");
  REQUIRE(plan.at("rules").size() == 2);
  CHECK(plan.at("rules").at(std::size_t{0}) ==
        Config::object({{"match", "model.layers.*.mlp.back.weight"}, {"action", "concat"}, {"dim", 1}}));
  CHECK(extended.unsure.size() == 2);
  CHECK(has(extended.unsure.back(), "\"model.layers.*.mlp.mystery\", BF16 [5, 3, 2]: more than two dimensions"));

  const std::vector<NamedSpec> far = {tensor("net.wte", {11, 8}),           tensor("net.blk.0.query.weight", {24, 8}),
                                      tensor("net.blk.0.query.bias", {24}), tensor("net.blk.0.back.weight", {8, 16}),
                                      tensor("net.blk.0.back.bias", {8}),   tensor("net.blk.0.square.weight", {8, 8})};
  const SuggestedPlan alone = suggest_plan(far, &config);
  const MergePlan parsed = MergePlan::parse(alone.text, "suggested", &config);
  REQUIRE(parsed.layers());
  CHECK(parsed.layers()->pattern.find("net.blk.3.query.weight") == 3);
  const auto dim = [&](const char* name) {
    const auto* concat = std::get_if<ConcatAction>(&parsed.find(name)->action);
    return concat == nullptr ? -1 : concat->dim;
  };
  CHECK(dim("net.wte") == 0);
  CHECK(dim("net.blk.1.query.weight") == 0);
  CHECK(dim("net.blk.1.query.bias") == 0);
  CHECK(dim("net.blk.1.back.weight") == 1);
  CHECK(dim("net.blk.1.back.bias") == -1);
  CHECK(std::ranges::any_of(alone.unsure,
                            [](const std::string& words) { return words.find("square") != std::string::npos; }));
}

TEST_CASE(
    "packed weights of AWQ, GPTQ and compressed-tensors are restored from ranks, and groups are not cut through") {
  const Config config =
      parse_json(R"({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 128})");
  const auto tensors_of = [](const std::string& format) {
    std::vector<NamedSpec> all;
    const auto add = [&](const std::string& module, const char* name, DType dtype, Shape shape) {
      all.push_back({"model.layers.0." + module + "." + name, {dtype, std::move(shape)}});
    };
    const auto matrix = [&](const std::string& module, std::int64_t in, std::int64_t out) {
      constexpr std::int64_t group = 32;
      if (format == "compressed") {
        add(module, "weight_packed", DType::i32, {out, in / 8});
        add(module, "weight_scale", DType::bf16, {out, in / group});
        add(module, "weight_shape", DType::i64, {2});
        return;
      }
      add(module, "qweight", DType::i32, format == "awq" ? Shape{in, out / 8} : Shape{in / 8, out});
      add(module, "scales", DType::f16, {in / group, out});
      add(module, "qzeros", DType::i32, {in / group, out / 8});
      if (format == "gptq") add(module, "g_idx", DType::i32, {in});
    };
    matrix("self_attn.q_proj", 128, 128);
    matrix("self_attn.k_proj", 128, 64);
    matrix("self_attn.v_proj", 128, 64);
    matrix("self_attn.o_proj", 128, 128);
    matrix("mlp.gate_proj", 128, 192);
    matrix("mlp.up_proj", 128, 192);
    matrix("mlp.down_proj", 192, 128);
    return all;
  };
  for (const char* plan_name : {"llama", "moe"}) {
    const MergePlan plan = MergePlan::load(plan_name, &config);
    for (const std::string format : {"awq", "gptq", "compressed"}) {
      CAPTURE(format);
      const std::vector<NamedSpec> model = tensors_of(format);
      const Placement placement = place(plan, {.tensor = 2}, wholes_of(plan, model));
      std::vector<RankTensors> shards;
      for (std::size_t rank = 0; rank < 2; ++rank) {
        RankTensors& shard = shards.emplace_back(RankTensors{{}, placement.padded[rank], placement.heads[rank], true});
        for (const PlacedTensor& placed : placement.ranks[rank]) {
          const merge::Cut& cut = placement.cuts[placed.whole];
          shard.tensors.push_back({placed.name, cut.part});
          // Unless both ranks have the same tensor, each has half of it.
          const std::int64_t whole = element_count(model[placed.whole].spec.shape);
          if (cut.part.shape != model[placed.whole].spec.shape) CHECK(element_count(cut.part.shape) * 2 == whole);
        }
      }
      std::map<std::string, Shape> wanted;
      for (const NamedSpec& tensor : model) wanted[tensor.name] = tensor.spec.shape;
      const Arrangement arrangement = arrange(plan, {.tensor = 2}, shards);
      CHECK(arrangement.tensors.size() == model.size());
      for (const ArrangedTensor& tensor : arrangement.tensors) CHECK(tensor.layout.target.shape == wanted[tensor.name]);
      // 192 inputs are 6 groups of 32, which cannot be divided between 4 ranks.
      CHECK(has(words_of(ErrorKind::invalid_argument, [&] { place(plan, {.tensor = 4}, wholes_of(plan, model)); }),
                "splits its blocks"));
    }
  }
}

TEST_CASE("adapters are cut like their weights") {
  const Config config = parse_json(R"({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2})");
  const MergePlan plan = MergePlan::load("lora", &config);
  const std::string at = "base_model.model.model.layers.0.";
  const auto part = [&](const std::string& name, Shape shape) {
    const MergeRule* rule = plan.find(at + name);
    REQUIRE(rule != nullptr);
    const TensorSpec whole{DType::f32, std::move(shape)};
    const ResolvedMerge resolved = plan.resolve(*rule, at + name, std::span(&whole, 1), true);
    return merge::cut(resolved.merge, whole, 2, resolved.heads).part.shape;
  };
  CHECK(part("self_attn.q_proj.lora_A.weight", {3, 6}) == Shape{3, 6});
  CHECK(part("self_attn.q_proj.lora_B.weight", {8, 3}) == Shape{4, 3});
  CHECK(part("self_attn.v_proj.lora_B.weight", {4, 3}) == Shape{2, 3});
  CHECK(part("self_attn.o_proj.lora_A.weight", {3, 8}) == Shape{3, 4});
  CHECK(part("self_attn.o_proj.lora_B.weight", {6, 3}) == Shape{6, 3});
  CHECK(part("mlp.down_proj.lora_A.weight", {3, 10}) == Shape{3, 5});
}

// SPDX-License-Identifier: Apache-2.0
// Built-in plans against the names and shapes of real models. tests/data/model_names has the tensors that transformers
// 5 writes for each architecture with a tiny config. Every tensor of a model must have a rule, and every rule must
// match its shape.

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "tests/support/plans.hpp"

using namespace muster;

namespace {

struct NamedModel {
  std::string name;
  Config config;
  std::map<std::string, Shape> tensors;
};

std::vector<NamedModel> models() {
  std::vector<NamedModel> all;
  for (const auto& entry : std::filesystem::directory_iterator(MUSTER_TEST_DATA "/model_names")) {
    std::ifstream file(entry.path());
    const std::string text(std::istreambuf_iterator<char>(file), {});
    const Config json = parse_json(text);
    NamedModel model{entry.path().stem(), json.at("config"), {}};
    for (const auto& [name, extents] : json.at("tensors").as_object()) {
      Shape shape;
      for (const Config& extent : extents.as_array()) shape.push_back(extent.as_int());
      model.tensors[name] = shape;
    }
    all.push_back(std::move(model));
  }
  return all;
}

TensorSpec spec_of_shape(Shape shape) {
  return {DType::f32, std::move(shape)};
}

// The required cut of the scale of a weight, derived from the merge of the weight.
enum class CutWay { rows, columns, none };
CutWay cut_of(const Merge& merge) {
  const auto* concat = std::get_if<merge::Concat>(&merge);
  if (concat == nullptr) return CutWay::none;
  return concat->dim == 0 ? CutWay::rows : CutWay::columns;
}

}  // namespace

TEST_CASE("every tensor of the models that auto knows has a rule that matches its shape") {
  const std::vector<NamedModel> all = models();
  REQUIRE(all.size() >= 45);
  std::set<std::string> plans;
  for (const NamedModel& model : all) {
    CAPTURE(model.name);
    const MergePlan plan = MergePlan::load("auto", &model.config);
    plans.insert(plan.name());
    for (const auto& [name, shape] : model.tensors) {
      CAPTURE(name);
      const MergeRule* rule = plan.find(name);
      REQUIRE(rule != nullptr);
      CHECK(MergePlan::renamed(*rule, name) == name);
      CHECK(plan.origin(name)->rule == rule);
      const std::vector<TensorSpec> whole = {spec_of_shape(shape)};
      const ResolvedMerge resolved = plan.resolve(*rule, name, whole, true);
      CHECK_FALSE(resolved.true_size);
      if (const auto* concat = std::get_if<merge::Concat>(&resolved.merge)) {
        const auto dimensions = static_cast<std::int64_t>(shape.size());
        REQUIRE(concat->dim < dimensions);
        const std::int64_t size = shape[static_cast<std::size_t>(concat->dim)];
        std::int64_t parts = 0;
        for (const std::int64_t block : concat->blocks) parts += block;
        if (parts != 0) CHECK(size % parts == 0);
      } else {
        // Only tied and replicated tensors are the same on all ranks. The large ones are listed here one by one.
        const bool is_small = shape.size() < 2;
        bool is_known = false;
        for (const std::string_view part : {"gate.weight", "router", "_a_proj", "position_embeddings", "token_type",
                                            "transform", "dense", "embeddings_project", "norm", "gate.weight"})
          is_known = is_known || name.find(part) != std::string::npos;
        CHECK((is_small || is_known));
      }
      // The number pattern matches layers and experts, and nothing else.
      const bool has_layer = name.find("layers.") != std::string::npos || name.find("layer.") != std::string::npos;
      REQUIRE(plan.layers().has_value());
      CHECK(plan.layers()->renumber);
      const bool is_router = name.find("router.layer.") != std::string::npos;
      CHECK((plan.layers()->pattern.find(name).has_value() == has_layer || is_router));
      if (plan.experts()) {
        CHECK_FALSE(plan.experts()->renumber);
        const std::size_t at = name.find("experts.");
        const bool has_number = at != std::string::npos && name[at + 8] >= '0' && name[at + 8] <= '9';
        CHECK(plan.experts()->pattern.find(name).has_value() == has_number);
        const bool is_fused = name.find("_linear.weight") != std::string::npos ||
                              (at != std::string::npos && !has_number && name.find("shared") == std::string::npos);
        CHECK((rule->across == Axis::expert) == is_fused);
      }
    }
  }
  CHECK(plans == std::set<std::string>{"bert", "gpt-neox", "llama", "moe"});
}

TEST_CASE("the models that auto knows match their config.json, and are restored from any number of ranks") {
  for (const NamedModel& model : models()) {
    CAPTURE(model.name);
    const MergePlan plan = MergePlan::load("auto", &model.config);
    std::vector<NamedSpec> tensors;
    for (const auto& [name, shape] : model.tensors) tensors.push_back({name, spec_of_shape(shape)});
    CHECK_NOTHROW(check_against_config(plan, tensors));
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(ranks);
      for (const ArrangedTensor& tensor : test::cut_and_arranged(plan, tensors, ranks).tensors) {
        CAPTURE(tensor.name);
        CHECK(tensor.layout.target.shape == model.tensors.at(tensor.name));
      }
    }
  }
}

TEST_CASE("a tensor that config.json does not describe is not an error") {
  const Config config = parse_json(R"({"vision_config": {"hidden_size": 24}, "text_config": {"hidden_size": 32,
      "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": null, "vocab_size": 90, "num_hidden_layers": 1}})");
  const MergePlan plan = MergePlan::parse(R"({"muster_plan": 1, "layers": "*layers.#.*", "rules": [
      {"match": "*", "action": "same"}]})",
                                          "p", &config);
  const std::string text = "model.language_model.";
  const auto check = [&](const std::string& name, Shape shape, DType dtype = DType::bf16) {
    check_against_config(plan, std::vector<NamedSpec>{{text + "embed_tokens.weight", {DType::bf16, {96, 32}}},
                                                      {text + "layers.0.norm.weight", {DType::bf16, {32}}},
                                                      {name, {dtype, std::move(shape)}}});
  };
  CHECK_NOTHROW(check("model.vision_tower.layers.0.self_attn.q_proj.weight", {24, 24}));
  CHECK_NOTHROW(check(text + "layers.0.self_attn.q_proj.weight", {64, 32}));             // with a gate
  CHECK_NOTHROW(check(text + "layers.0.self_attn.k_proj.weight", {8, 32}));              // heads of each layer
  CHECK_NOTHROW(check(text + "layers.0.self_attn.q_proj.weight", {32, 16}, DType::u8));  // packed
  CHECK_NOTHROW(check(text + "layers.0.mlp.experts.0.down_proj.weight", {16, 32}));
  CHECK_NOTHROW(check(text + "layers.1.extra.weight", {3, 3}));
  // An adapter of some layers.
  CHECK_NOTHROW(check_against_config(
      plan,
      std::vector<NamedSpec>{{"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", {DType::bf16, {4, 32}}}}));
  CHECK_THROWS_AS(check(text + "layers.0.self_attn.q_proj.weight", {16, 32}), Error);
  CHECK_THROWS_AS(check(text + "layers.0.self_attn.o_proj.weight", {32, 64}), Error);
}

TEST_CASE("each dimension of a weight that config.json gives is compared with it") {
  const Config config = parse_json(R"({"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
      "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 1})");
  const MergePlan plan = MergePlan::parse(R"({"muster_plan": 1, "layers": "*layers.#.*", "rules": [
      {"match": "*", "action": "same"}]})",
                                          "p", &config);
  const std::string layer = "model.layers.0.";
  const std::vector<std::pair<std::string, Shape>> weights = {
      {"model.embed_tokens.weight", {96, 32}},       {layer + "self_attn.q_proj.weight", {32, 32}},
      {layer + "self_attn.k_proj.weight", {16, 32}}, {layer + "self_attn.v_proj.weight", {16, 32}},
      {layer + "self_attn.o_proj.weight", {32, 32}}, {layer + "mlp.gate_proj.weight", {48, 32}},
      {layer + "mlp.up_proj.weight", {48, 32}},      {layer + "mlp.down_proj.weight", {32, 48}},
  };
  for (const std::size_t wrong : {std::size_t{0}, std::size_t{1}}) {
    for (const auto& [name, shape] : weights) {
      std::vector<NamedSpec> model;
      for (const auto& [each, right] : weights) model.push_back({each, {DType::bf16, right}});
      CHECK_NOTHROW(check_against_config(plan, model));
      const auto changed = std::ranges::find(model, name, &NamedSpec::name);
      changed->spec.shape[wrong] -= 8;
      CAPTURE(name);
      CAPTURE(wrong);
      CHECK_THROWS_AS(check_against_config(plan, model), Error);
    }
  }
}

TEST_CASE("a layer moved to another stage keeps its name except for the number") {
  for (const NamedModel& model : models()) {
    const MergePlan plan = MergePlan::load("auto", &model.config);
    for (const auto& [name, shape] : model.tensors) {
      const auto number = plan.layers()->pattern.find(name);
      if (!number) continue;
      const std::string moved = plan.layers()->pattern.replace(name, *number + 70);
      CAPTURE(moved);
      CHECK(plan.layers()->pattern.find(moved) == *number + 70);
      CHECK(plan.layers()->pattern.replace(moved, *number) == name);
      CHECK(plan.find(moved) == plan.find(name));
    }
  }
}

TEST_CASE("the scales of a quantized weight are cut like the weight") {
  std::size_t checked = 0;
  for (const NamedModel& model : models()) {
    CAPTURE(model.name);
    const MergePlan plan = MergePlan::load("auto", &model.config);
    for (const auto& [name, shape] : model.tensors) {
      const bool is_linear = name.ends_with(".weight") && shape.size() == 2 && shape[0] > 1 && shape[1] > 1 &&
                             plan.layers()->pattern.find(name) && name.find("embeddings") == std::string::npos &&
                             name.find("_linear.") == std::string::npos;
      if (!is_linear) continue;
      const std::string module = name.substr(0, name.size() - 7);
      CAPTURE(module);
      const std::vector<TensorSpec> weight = {spec_of_shape(shape)};
      const Merge weights = plan.resolve(*plan.find(name), name, weight, true).merge;
      const CutWay cut = cut_of(weights);
      const auto resolve = [&](const std::string& suffix, Shape of, std::size_t ranks) {
        const std::string full = module + suffix;
        CAPTURE(full);
        const MergeRule* rule = plan.find(full);
        REQUIRE(rule != nullptr);
        const std::vector<TensorSpec> specs(ranks, spec_of_shape(std::move(of)));
        return plan.resolve(*rule, full, specs, ranks == 1).merge;
      };
      const auto is_concat = [](const Merge& merge, std::int64_t dim) {
        const auto* concat = std::get_if<merge::Concat>(&merge);
        return concat != nullptr && concat->dim == dim;
      };
      for (const std::string suffix :
           {".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".weight_quantizer._amax",
            ".weight_quantizer._scale", ".weight_quantizer.0._amax"}) {
        for (const Shape& one : {Shape{}, Shape{1}, Shape{1, 1}}) {
          CHECK(resolve(suffix, one, 2) == (cut == CutWay::none ? merge::same() : merge::max()));
          CHECK(resolve(suffix, one, 1) == merge::same());
        }
        const Merge per_row = resolve(suffix, {shape[0]}, 2);
        const Merge per_kept_row = resolve(suffix, {shape[0], 1}, 2);
        const Merge per_block = resolve(suffix, {shape[0], 2}, 2);
        if (cut == CutWay::rows) {
          // A fused weight has a fused scale.
          CHECK(per_row == weights);
          CHECK(per_kept_row == weights);
          CHECK(per_block == weights);
        } else {
          CHECK(per_row == merge::same());
          CHECK(per_kept_row == merge::same());
          CHECK((cut == CutWay::columns ? is_concat(per_block, 1) : per_block == merge::same()));
        }
      }
      for (const std::string suffix : {".input_scale", ".input_quantizer._amax", ".output_quantizer._amax"})
        CHECK(resolve(suffix, {}, 2) == merge::max());
      for (const std::string suffix : {".pre_quant_scale", ".input_quantizer._pre_quant_scale"}) {
        const Merge inputs = resolve(suffix, {shape[1]}, 2);
        CHECK((cut == CutWay::columns ? is_concat(inputs, -1) : inputs == merge::same()));
      }
      ++checked;
    }
  }
  CHECK(checked > 400);
}

TEST_CASE("scales of keys and values, under every name") {
  for (const std::string plan_name : {"llama", "moe"}) {
    const MergePlan plan = MergePlan::load(plan_name);
    for (const std::string name :
         {"k_proj.k_scale", "v_proj.v_scale", "k_proj.k_bias", "attn.k_scale", "attn.prob_scale", "kv_scale",
          "k_bmm_quantizer._amax", "v_bmm_quantizer._bias_value"}) {
      const std::string full = "model.layers.3.self_attn." + name;
      CAPTURE(full);
      const MergeRule* rule = plan.find(full);
      REQUIRE(rule != nullptr);
      CHECK(plan.resolve(*rule, full, std::vector<TensorSpec>(2, spec_of_shape({}))).merge == merge::max());
      CHECK(plan.resolve(*rule, full, std::vector<TensorSpec>(2, spec_of_shape({4}))).merge == merge::concat(0));
    }
  }
}

TEST_CASE("fused experts are joined across expert ranks, with their scales") {
  const MergePlan plan = MergePlan::load("moe");
  for (const std::string name :
       {"gate_up_proj", "down_proj", "gate_up_proj_bias", "gate_up_proj_blocks", "down_proj_scales",
        "gate_up_proj_weight_scale", "down_proj_weight_scale_2", "down_proj_input_scale"}) {
    const std::string full = "model.layers.3.mlp.experts." + name;
    CAPTURE(full);
    const MergeRule* rule = plan.find(full);
    REQUIRE(rule != nullptr);
    CHECK(rule->across == Axis::expert);
    CHECK(plan.resolve(*rule, full, std::vector<TensorSpec>(2, spec_of_shape({4, 2, 2}))).merge == merge::concat(0));
  }
  // DeepSeek-V3's layer for multi-token prediction.
  for (const std::string name : {"enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight",
                                 "shared_head.norm.weight", "shared_head.head.weight"})
    CHECK(plan.find("model.layers.61." + name) != nullptr);
}

TEST_CASE("heads of BERT, with and without a prefix") {
  const MergePlan plan = MergePlan::load("bert");
  for (const std::string name : {"classifier.weight", "classifier.dense.bias", "classifier.out_proj.weight",
                                 "qa_outputs.bias", "bert.pooler.dense.weight", "cls.seq_relationship.bias",
                                 "discriminator_predictions.dense_prediction.weight", "lm_head.dense.weight"})
    CHECK(action_name(plan.find(name)->action) == "same");
  CHECK(plan.find("bert.embeddings.LayerNorm.weight")->stage == Stage::first);
  CHECK(plan.find("cls.predictions.transform.LayerNorm.weight")->stage == Stage::last);
}

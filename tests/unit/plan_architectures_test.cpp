// SPDX-License-Identifier: Apache-2.0
// Tests every architecture that --plan auto knows. tests/data/architectures.json has the names of its tensors, and the
// axes along which transformers cuts them (tests/interop/transformers_facts.py). A tensor that is split and merged
// along a wrong axis is still complete, so the test compares the axes, and the parts of each rank head by head.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "tests/support/plans.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;

namespace {

const Config& architectures() {
  static const Config json = [] {
    std::ifstream file(MUSTER_TEST_DATA "/architectures.json");
    return parse_json(std::string(std::istreambuf_iterator<char>(file), {}));
  }();
  return json.at("models");
}

TensorSpec spec_of(const Config& extents) {
  TensorSpec spec{DType::bf16, {}};
  for (const Config& extent : extents.as_array()) spec.shape.push_back(extent.as_int());
  return spec;
}

std::vector<NamedSpec> sample_tensors(const Config& model) {
  std::vector<NamedSpec> tensors;
  for (const auto& [name, extents] : model.at("tensors").as_object()) tensors.push_back({name, spec_of(extents)});
  return tensors;
}

bool is_number(std::string_view part) {
  return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
}

// Returns the module of a tensor, relative to its layer, with the names of transformers: there all experts of a layer
// are one module.
std::string module_of(std::string name) {
  for (const std::string_view end : {".weight", ".bias"})
    if (name.ends_with(end)) name.resize(name.size() - end.size());
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    at = end + 1;
    const bool is_expert = !parts.empty() && parts.back() == "experts";
    if (is_number(part) || part == "*") {
      if (!is_expert) parts.clear();
    } else if (is_expert) {
      parts.push_back(part == "down_proj" || part == "w2" ? "down_proj" : "gate_up_proj");
    } else {
      parts.push_back(part == "block_sparse_moe" ? "mlp" : part);
    }
  }
  if (parts.empty()) return {};
  const bool is_of_model = std::ranges::find(parts, "embed_tokens") != parts.end() || parts.back() == "lm_head";
  std::string module;
  for (std::size_t i = is_of_model ? parts.size() - 1 : 0; i < parts.size(); ++i)
    module += (module.empty() ? "" : ".") + parts[i];
  return module;
}

// Returns the dimensions along which a style of tp_plan cuts a weight and its bias; nullopt: all ranks have the whole
// tensor.
struct Axes {
  std::optional<std::int64_t> weight;
  std::optional<std::int64_t> bias;
};
Axes axes_of(const std::string& style) {
  if (style.starts_with("colwise") || style == "packed_colwise") return {0, 0};
  if (style.starts_with("rowwise")) return {1, std::nullopt};
  if (style == "embedding_rowwise") return {0, std::nullopt};
  if (style == "conv1d_colwise") return {1, 0};
  if (style == "conv1d_rowwise") return {0, std::nullopt};
  REQUIRE((style == "replicated_with_grad_allreduce" || style == "mla_kv_a_proj"));
  return {};
}

// Returns true for matrices that Muster does not cut as tp_plan does. For linear attention, transformers gathers the
// heads and cuts the output projection by rows, but Megatron and Muster cut it by columns. All ranks have the whole
// towers and the modules between them and the text model.
bool is_cut_otherwise(const std::string& name) {
  return std::ranges::any_of(std::array{"linear_attn.out_proj", "multi_modal_projector", "vision", "visual"},
                             [&](const char* part) { return name.find(part) != std::string::npos; });
}

std::optional<std::int64_t> cut_along(const MergePlan& plan, const NamedSpec& tensor) {
  const Merge merge = plan.resolve(*plan.find(tensor.name), tensor.name, std::span(&tensor.spec, 1), true).merge;
  const auto* concat = std::get_if<merge::Concat>(&merge);
  return concat == nullptr ? std::nullopt : std::optional(concat->dim);
}

// Consecutive heads of a tensor along its cut dimension: `count` heads of queries ('q') or keys ('k') of `size`
// elements each.
struct Heads {
  char kind = 'q';
  std::int64_t count = 1;
  std::int64_t size = 1;
};
struct Headed {
  std::string name;
  std::vector<Heads> blocks;
  std::size_t dim = 0;
  std::int64_t groups = 1;  // number of repetitions of the blocks
};
struct Owner {
  char kind = 'q';
  std::int64_t head = 0;
  friend auto operator<=>(const Owner&, const Owner&) = default;
};

std::vector<Owner> owners_of(const Headed& tensor) {
  std::vector<Owner> owners;
  for (std::int64_t group = 0; group < tensor.groups; ++group)
    for (const Heads& block : tensor.blocks)
      for (std::int64_t head = 0; head < block.count; ++head)
        owners.insert(owners.end(), static_cast<std::size_t>(block.size), {block.kind, group * block.count + head});
  return owners;
}

// Returns the heads of each kind in a part. Throws a std::string if a head is divided.
std::map<char, std::vector<std::int64_t>> heads_in(const Headed& tensor, const merge::Cut& cut, std::size_t part) {
  const std::vector<Owner> owners = owners_of(tensor);
  std::map<Owner, std::int64_t> whole;
  for (const Owner& owner : owners) ++whole[owner];
  std::map<Owner, std::int64_t> held;
  std::map<char, std::vector<std::int64_t>> heads;
  for (const merge::UnitRange& piece : cut.pieces[part])
    for (std::int64_t i = piece.begin; i < piece.begin + piece.count; ++i) {
      const Owner& owner = owners[static_cast<std::size_t>(i)];
      auto& mine = heads[owner.kind];
      if (held[owner]++ == 0) mine.push_back(owner.head);
    }
  for (const auto& [owner, count] : held)
    if (count != whole[owner]) throw std::string(tensor.name + ": a head is cut through");
  return heads;
}

struct AttentionLayout {
  std::string plan;
  std::string config;  // with Q and K for the numbers of heads
  std::vector<Headed> (*tensors)(std::int64_t queries, std::int64_t keys);
};

using Number = std::int64_t;
const std::vector<AttentionLayout>& attention_layouts() {
  constexpr Number d = 4;
  static const std::string llama = "model.layers.0.self_attn.";
  static const std::string linear = "model.layers.0.linear_attn.";
  static const std::vector<AttentionLayout> all = {
      {"llama", R"("num_attention_heads": Q, "num_key_value_heads": K, "head_dim": 4, "use_qk_norm": true)",
       [](Number q, Number k) {
         return std::vector<Headed>{
             {llama + "q_proj.weight", {{'q', q, d}}}, {llama + "k_proj.weight", {{'k', k, d}}},
             {llama + "v_proj.bias", {{'k', k, d}}},   {llama + "q_norm.weight", {{'q', q, 1}}},
             {llama + "k_norm.weight", {{'k', k, 1}}}, {llama + "o_proj.weight", {{'q', q, d}}, 1}};
       }},
      {"llama", R"("num_attention_heads": Q, "num_key_value_heads": K, "head_dim": 4)",
       [](Number q, Number k) {
         return std::vector<Headed>{{llama + "qkv_proj.weight", {{'q', q, d}, {'k', k, d}, {'k', k, d}}},
                                    {llama + "o_proj.weight", {{'q', q, d}}, 1}};
       }},
      {"moe", R"("text_config": {"num_attention_heads": Q, "num_key_value_heads": K, "head_dim": 4})",
       [](Number q, Number k) {
         return std::vector<Headed>{{llama + "q_proj.weight", {{'q', q, 2 * d}}},  // with a gate beside each head
                                    {llama + "k_proj.weight", {{'k', k, d}}},
                                    {llama + "sinks", {{'q', q, 1}}},
                                    {llama + "o_proj.weight", {{'q', q, d}}, 1}};
       }},
      {"falcon", R"("num_attention_heads": Q, "num_kv_heads": K)",
       [](Number q, Number k) {
         return std::vector<Headed>{
             {"transformer.h.0.self_attention.query_key_value.weight", {{'q', q / k, d}, {'k', 1, 2 * d}}, 0, k},
             {"transformer.h.0.self_attention.dense.weight", {{'q', q, d}}, 1}};
       }},
      {"gpt-bigcode", R"("n_head": Q)",
       [](Number q, Number) {
         return std::vector<Headed>{{"transformer.h.0.attn.c_attn.weight", {{'q', q, d}, {'k', 1, d}, {'k', 1, d}}},
                                    {"transformer.h.0.attn.c_proj.weight", {{'q', q, d}}, 1}};
       }},
      {"gpt2", R"("n_head": Q)",
       [](Number q, Number) {
         return std::vector<Headed>{{"h.0.attn.c_attn.weight", {{'q', q, d}, {'q', q, d}, {'q', q, d}}, 1},
                                    {"h.0.attn.c_proj.weight", {{'q', q, d}}, 0}};
       }},
      {"qwen-hybrid",
       R"("linear_num_value_heads": Q, "linear_num_key_heads": K, "linear_key_head_dim": 4, "linear_value_head_dim": 6)",
       [](Number q, Number k) {
         return std::vector<Headed>{
             {linear + "in_proj_qkvz.weight", {{'k', 1, 2 * d}, {'q', q / k, 6}, {'q', q / k, 6}}, 0, k},
             {linear + "in_proj_ba.weight", {{'q', q / k, 1}, {'q', q / k, 1}}, 0, k},
             {linear + "in_proj_qkv.weight", {{'k', k, d}, {'k', k, d}, {'q', q, 6}}},
             {linear + "conv1d.weight", {{'k', k, d}, {'k', k, d}, {'q', q, 6}}},
             {linear + "in_proj_z.weight", {{'q', q, 6}}},
             {linear + "A_log", {{'q', q, 1}}},
             {linear + "out_proj.weight", {{'q', q, 6}}, 1}};
       }},
  };
  return all;
}

Config config_with(std::string text, std::int64_t queries, std::int64_t keys) {
  for (const auto& [letter, number] : {std::pair("Q", queries), std::pair("K", keys)})
    if (const std::size_t at = text.find(std::string(": ") + letter); at != std::string::npos)
      text.replace(at + 2, 1, std::to_string(number));
  return parse_json("{" + text + "}");
}

}  // namespace

TEST_CASE("every tensor of every architecture that auto knows has a rule") {
  std::size_t names = 0;
  for (const auto& [kind, model] : architectures().as_object()) {
    CAPTURE(kind);
    const MergePlan plan = MergePlan::load("auto", &model.at("config"));
    const auto check = [&](const std::string& name) {
      CAPTURE(name);
      CHECK(plan.find(name) != nullptr);
      ++names;
    };
    for (const auto& [name, extents] : model.at("tensors").as_object()) check(name);
    // The names of classifiers and of models without a head lack a prefix.
    for (const Config& name : model.at("others").as_array()) check(name.as_string());
  }
  CHECK(architectures().as_object().size() >= 80);
  CHECK(names > 2500);
}

TEST_CASE("the axes of every architecture are those of the parallel layers of transformers and vLLM") {
  for (const auto& [kind, model] : architectures().as_object()) {
    CAPTURE(kind);
    const MergePlan plan = MergePlan::load("auto", &model.at("config"));
    std::map<std::string, std::string> styles;
    for (const std::string source : {"tp_plan", "parallel_layers"})
      for (const auto& [module, style] : model.at(source).as_object()) styles[module_of(module)] = style.as_string();
    std::set<std::string> compared;
    for (const NamedSpec& tensor : sample_tensors(model)) {
      const std::string module = module_of(tensor.name);
      const auto style = styles.find(module);
      if (style == styles.end() || is_cut_otherwise(tensor.name)) continue;
      CAPTURE(tensor.name);
      if (plan.find(tensor.name)->across == Axis::expert) continue;
      const Axes axes = axes_of(style->second);
      const bool is_bias = tensor.name.ends_with(".bias");
      // Experts with a number in their names are cut like other matrices.
      CHECK(cut_along(plan, tensor) == (is_bias ? axes.bias : axes.weight));
      compared.insert(module);
    }
    // All matrices of attention and of the feed-forward network were compared.
    CHECK(compared.size() >= (kind == "mamba" ? 5U : 3U));
  }
}

TEST_CASE(
    "every architecture is merged completely from any number of ranks, even if config.json omits the numbers of "
    "heads") {
  for (const auto& [kind, model] : architectures().as_object()) {
    CAPTURE(kind);
    const std::vector<NamedSpec> tensors = sample_tensors(model);
    MergePlan plan = MergePlan::load("auto", &model.at("config"));
    fit_to(plan, tensors);
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(ranks);
      for (const ArrangedTensor& tensor : test::cut_and_arranged(plan, tensors, ranks).tensors) {
        CAPTURE(tensor.name);
        CHECK(tensor.layout.target.shape == spec_of(model.at("tensors").at(tensor.name)).shape);
      }
    }
  }
}

TEST_CASE("the parts of a rank belong to the same heads, or the layout is refused") {
  std::size_t cuts = 0;
  for (const AttentionLayout& layout : attention_layouts()) {
    CAPTURE(layout.plan);
    for (const std::int64_t queries : {1, 2, 3, 4, 6, 8, 12, 16})
      for (std::int64_t keys = 1; keys <= queries; ++keys)
        // gpt-bigcode has one key-value head for all queries.
        for (int ranks = 1; queries % keys == 0 && (keys == 1 || layout.plan != "gpt-bigcode") && ranks <= 17;
             ++ranks) {
          CAPTURE(queries);
          CAPTURE(keys);
          CAPTURE(ranks);
          const Config config = config_with(layout.config, queries, keys);
          const MergePlan plan = MergePlan::load(layout.plan, &config);
          const std::vector<Headed> headed = layout.tensors(queries, keys);
          std::vector<NamedSpec> model;
          for (const Headed& tensor : headed) {
            Shape shape =
                tensor.name.ends_with("bias") || tensor.name.ends_with("A_log") || tensor.name.ends_with("sinks")
                    ? Shape{1}
                    : Shape{5, 5};
            shape[tensor.dim] = static_cast<std::int64_t>(owners_of(tensor).size());
            model.push_back({tensor.name, {DType::bf16, shape}});
          }
          std::optional<Placement> placement;
          try {
            placement = place(plan, {.tensor = ranks}, wholes_of(plan, model));
          } catch (const Error& error) {
            CHECK(error.kind() == ErrorKind::invalid_argument);
            // A layout may not be refused if the number of ranks divides the number of groups.
            CHECK(keys % ranks != 0);
            continue;
          }
          ++cuts;
          std::vector<std::int64_t> all;
          for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank) {
            std::map<char, std::vector<std::int64_t>> mine;
            for (std::size_t i = 0; i < headed.size(); ++i)
              for (const auto& [head_kind, heads] : heads_in(headed[i], placement->cuts[i], rank)) {
                CAPTURE(headed[i].name);
                const auto [known, is_new] = mine.emplace(head_kind, heads);
                CHECK(known->second == heads);
              }
            const std::vector<std::int64_t>& q = mine['q'];
            const std::vector<std::int64_t>& k = mine['k'];
            all.insert(all.end(), q.begin(), q.end());
            if (k.empty()) continue;
            for (const std::int64_t head : q) CHECK(std::ranges::find(k, head / (queries / keys)) != k.end());
            // Inference engines number the heads of each rank from 0, with the same number of queries per key.
            for (std::size_t i = 0; k.size() > 1 && i < q.size(); ++i)
              CHECK(k[i / (q.size() / k.size())] == q[i] / (queries / keys));
          }
          CHECK(all.size() == static_cast<std::size_t>(queries));
          CHECK(std::set(all.begin(), all.end()).size() == all.size());
        }
  }
  CHECK(cuts > 1000);
}

TEST_CASE("numbers of heads that config.json omits come from the shapes, then from the architecture's defaults") {
  const auto numbers = [](const std::string& json, const std::vector<NamedSpec>& tensors, std::int64_t ranks = 1) {
    const Config config = with_sizes(parse_json(json), tensors, ranks);
    return std::vector{model_number(config, "num_attention_heads").value_or(0),
                       model_number(config, "num_key_value_heads").value_or(0), head_size(config).value_or(0)};
  };
  using Numbers = std::vector<std::int64_t>;
  const std::string gemma =
      R"({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 64}})";
  CHECK(numbers(gemma, {}) == Numbers{8, 4, 256});
  const auto attention = [](const std::string& text, std::int64_t q, std::int64_t k, std::int64_t norm) {
    std::vector<NamedSpec> tensors = {{text + "embed_tokens.weight", {DType::bf16, {96, 64}}}};
    const std::string module = text + "layers.3.self_attn.";
    tensors.push_back({module + "o_proj.weight", {DType::bf16, {64, q}}});
    tensors.push_back({module + "k_proj.weight", {DType::bf16, {k, 64}}});
    if (norm != 0)
      for (const char letter : {'q', 'k'}) tensors.push_back({module + letter + "_norm.weight", {DType::bf16, {norm}}});
    return tensors;
  };
  const std::string text = "model.language_model.";
  CHECK(numbers(gemma, attention(text, 128, 64, 16)) == Numbers{8, 4, 16});
  CHECK(numbers(gemma, attention(text, 96, 32, 16)) == Numbers{6, 2, 16});
  CHECK(numbers(gemma, attention(text, 128, 64, 0)) == Numbers{8, 4, 8});
  // The tensors are parts of four ranks.
  CHECK(numbers(gemma, attention(text, 32, 16, 16), 4) == Numbers{8, 4, 16});
  // The model type is unknown.
  CHECK(numbers("{}", attention("model.", 128, 64, 16)) == Numbers{8, 4, 16});
  CHECK(numbers("{}", attention("model.", 128, 64, 128)) == Numbers{0, 0, 0});
  CHECK(numbers(R"({"hidden_size": 64})", attention("model.", 128, 64, 0)) == Numbers{0, 0, 0});
  // Numbers in config.json take precedence.
  CHECK(numbers(R"({"model_type": "llama", "num_attention_heads": 4, "head_dim": 32})",
                attention("model.", 128, 64, 0)) == Numbers{4, 2, 32});
  CHECK(numbers(R"({"model_type": "qwen2", "num_attention_heads": 4, "hidden_size": 64})", {}) == Numbers{4, 4, 16});
  for (const std::string place : {"text_config", "llm_config", "language_config"})
    CHECK(numbers(R"({"model_type": "x", ")" + place + R"(": {"model_type": "smollm3", "hidden_size": 64}})", {}) ==
          Numbers{16, 4, 4});
  CHECK(numbers(R"({"thinker_config": {"text_config": {"num_attention_heads": 4, "hidden_size": 64}}})", {}) ==
        Numbers{4, 4, 16});
  const Config linear = with_sizes(parse_json(R"({"model_type": "qwen3_next", "num_attention_heads": 16})"), {}, 1);
  CHECK(model_number(linear, "linear_num_value_heads") == 32);
}

TEST_CASE("without the numbers of heads, tensors are neither cut nor merged") {
  const MergePlan plan = MergePlan::load("llama");
  const std::vector<NamedSpec> model = {{"model.layers.0.self_attn.k_proj.weight", {DType::bf16, {8, 8}}}};
  CHECK_NOTHROW(place(plan, {.tensor = 1}, wholes_of(plan, model)));
  const std::string words =
      test::words_of(ErrorKind::invalid_argument, [&] { place(plan, {.tensor = 2}, wholes_of(plan, model)); });
  CHECK(test::has(words, "\"num_key_value_heads\" is missing in config.json"));
  CHECK(test::has(words, "k_proj"));
  const std::vector<RankTensors> ranks = {{model, {}}, {model, {}}};
  CHECK(test::has(test::words_of(ErrorKind::invalid_argument, [&] { arrange(plan, {.tensor = 2}, ranks); }),
                  "\"num_key_value_heads\" is missing in config.json"));
}

TEST_CASE("layers that predict further tokens belong to the last stage, whatever their numbers") {
  const Config config = parse_json(R"({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
      "linear_num_key_heads": 2, "linear_num_value_heads": 2})");
  const std::map<std::string, std::vector<std::string>> published = {
      {"qwen-hybrid",
       {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.mlp.experts.3.down_proj.weight", "mtp.layers.0.mlp.gate.weight", "mtp.fc.weight_scale_inv"}},
      {"moe",
       {"model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_block.0.mlp.down_proj.weight",
        "model.mtp_block.0.input_layernorm.weight", "model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight",
        "model.mtp_linear_proj.0.weight", "mtp.layers.0.mlp.up_proj.weight"}},
      {"llama",
       {"model.mtp_layers.0.self_attn.q_proj.weight", "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.mlp.down_proj.weight"}},
      {"multimodal", {"mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"}},
  };
  for (const auto& [plan_name, names] : published) {
    CAPTURE(plan_name);
    const MergePlan plan = MergePlan::load(plan_name, &config);
    std::vector<NamedSpec> model;
    for (const std::string& name : names) model.push_back({name, {DType::bf16, {8, 8}}});
    for (const int layer : {0, 1, 2})
      model.push_back({"model.layers." + std::to_string(layer) + ".mlp.gate_proj.weight", {DType::bf16, {8, 8}}});
    const ParallelLayout layout{.tensor = 2, .pipeline = 2};
    const Placement placement = place(plan, layout, wholes_of(plan, model));
    std::vector<RankTensors> shards;
    for (std::size_t rank = 0; rank < placement.ranks.size(); ++rank) {
      RankTensors& shard = shards.emplace_back(RankTensors{{}, placement.padded[rank], placement.heads[rank], true});
      for (const PlacedTensor& placed : placement.ranks[rank])
        shard.tensors.push_back({placed.name, placement.cuts[placed.whole].part});
      for (const std::string& name : names) {
        CAPTURE(name);
        CHECK(std::ranges::count(shard.tensors, name, &NamedSpec::name) == (rank < 2 ? 0 : 1));
      }
    }
    const Arrangement whole = arrange(plan, layout, shards);
    CHECK(whole.tensors.size() == model.size());
    for (const ArrangedTensor& tensor : whole.tensors) CHECK(tensor.layout.target.shape == Shape{8, 8});
    for (const std::string& name : names) {
      const bool is_matrix = name.ends_with("proj.weight") && name.find("input_proj") == std::string::npos &&
                             name.find("linear_proj") == std::string::npos;
      CHECK((action_name(plan.find(name)->action) == "concat") == is_matrix);
    }
  }
  // Such layers of DeepSeek and GLM continue the numbers of the other layers.
  const MergePlan moe = MergePlan::load("moe");
  CHECK(moe.layers()->find("model.layers.61.shared_head.head.weight") == 61);
}

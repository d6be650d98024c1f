// SPDX-License-Identifier: Apache-2.0
#include "tests/support/models.hpp"

#include <fmt/core.h>

#include <string>

namespace muster::test {

inspect::DemoModel llama(bool tied) {
  inspect::DemoModel model = inspect::llama_model({.hidden = 48,
                                                   .intermediate = 100,
                                                   .layers = 5,
                                                   .heads = 12,
                                                   .key_value_heads = 4,
                                                   .vocabulary = 101,
                                                   .biases = true,
                                                   .tied_head = tied});
  for (int layer = 0; layer < 5; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    model.tensors.push_back({prefix + "self_attn.q_proj.weight_scale", DType::f32, {48, 1}});
    model.tensors.push_back({prefix + "mlp.down_proj.weight_scale", DType::f32, {48, 1}});
    model.tensors.push_back({prefix + "mlp.down_proj.input_scale", DType::f32, {}});
  }
  return model;
}

inspect::DemoModel gpt_neox() {
  inspect::DemoModel model;
  model.config = R"({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 48,
      "num_attention_heads": 24})";
  auto& tensors = model.tensors;
  tensors.push_back({"gpt_neox.embed_in.weight", DType::bf16, {103, 48}});
  for (int layer = 0; layer < 4; ++layer) {
    const std::string prefix = "gpt_neox.layers." + std::to_string(layer) + ".";
    for (const std::string norm : {"input_layernorm", "post_attention_layernorm"})
      for (const std::string part : {".weight", ".bias"}) tensors.push_back({prefix + norm + part, DType::bf16, {48}});
    tensors.push_back({prefix + "attention.query_key_value.weight", DType::bf16, {144, 48}});
    tensors.push_back({prefix + "attention.query_key_value.bias", DType::bf16, {144}});
    tensors.push_back({prefix + "attention.dense.weight", DType::bf16, {48, 48}});
    tensors.push_back({prefix + "attention.dense.bias", DType::bf16, {48}});
    tensors.push_back({prefix + "mlp.dense_h_to_4h.weight", DType::bf16, {190, 48}});
    tensors.push_back({prefix + "mlp.dense_h_to_4h.bias", DType::bf16, {190}});
    tensors.push_back({prefix + "mlp.dense_4h_to_h.weight", DType::bf16, {48, 190}});
    tensors.push_back({prefix + "mlp.dense_4h_to_h.bias", DType::bf16, {48}});
  }
  tensors.push_back({"gpt_neox.final_layer_norm.weight", DType::bf16, {48}});
  tensors.push_back({"gpt_neox.final_layer_norm.bias", DType::bf16, {48}});
  tensors.push_back({"embed_out.weight", DType::bf16, {103, 48}});
  return model;
}

inspect::DemoModel bert(const BertSizes& sizes) {
  inspect::DemoModel model;
  const std::string begin = sizes.prefix ? "bert." : "";
  const auto add = [&](const std::string& name, Shape shape, DType dtype = DType::f32) {
    model.tensors.push_back({begin + name, dtype, std::move(shape)});
  };
  const auto add_linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    add(name + ".weight", {out, in});
    add(name + ".bias", {out});
  };
  const auto add_norm = [&](const std::string& name) {
    add(name + ".weight", {sizes.hidden});
    add(name + ".bias", {sizes.hidden});
  };
  add("embeddings.position_ids", {1, sizes.positions}, DType::i64);
  add("embeddings.word_embeddings.weight", {sizes.vocabulary, sizes.hidden});
  add("embeddings.position_embeddings.weight", {sizes.positions, sizes.hidden});
  add("embeddings.token_type_embeddings.weight", {2, sizes.hidden});
  add_norm("embeddings.LayerNorm");
  for (std::int64_t layer = 0; layer < sizes.layers; ++layer) {
    const std::string at = fmt::format("encoder.layer.{}.", layer);
    for (const char* part : {"query", "key", "value"})
      add_linear(at + "attention.self." + part, sizes.hidden, sizes.hidden);
    add_linear(at + "attention.output.dense", sizes.hidden, sizes.hidden);
    add_norm(at + "attention.output.LayerNorm");
    add_linear(at + "intermediate.dense", sizes.intermediate, sizes.hidden);
    add_linear(at + "output.dense", sizes.hidden, sizes.intermediate);
    add_norm(at + "output.LayerNorm");
  }
  add_linear("pooler.dense", sizes.hidden, sizes.hidden);
  model.config =
      fmt::format(R"({{
  "architectures": ["BertModel"],
  "model_type": "bert",
  "hidden_size": {},
  "intermediate_size": {},
  "max_position_embeddings": {},
  "num_attention_heads": {},
  "num_hidden_layers": {},
  "type_vocab_size": 2,
  "vocab_size": {}
}}
)",
                  sizes.hidden, sizes.intermediate, sizes.positions, sizes.heads, sizes.layers, sizes.vocabulary);
  return model;
}

inspect::DemoModel mixtral(int layers, int experts) {
  inspect::DemoModel model;
  model.config = R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 40,
      "num_attention_heads": 20, "num_key_value_heads": 10})";
  auto& tensors = model.tensors;
  tensors.push_back({"model.embed_tokens.weight", DType::bf16, {101, 40}});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    for (const std::string norm : {"input_layernorm", "post_attention_layernorm"})
      tensors.push_back({prefix + norm + ".weight", DType::bf16, {40}});
    tensors.push_back({prefix + "self_attn.q_proj.weight", DType::bf16, {40, 40}});
    tensors.push_back({prefix + "self_attn.k_proj.weight", DType::bf16, {20, 40}});
    tensors.push_back({prefix + "self_attn.v_proj.weight", DType::bf16, {20, 40}});
    tensors.push_back({prefix + "self_attn.o_proj.weight", DType::bf16, {40, 40}});
    tensors.push_back({prefix + "block_sparse_moe.gate.weight", DType::bf16, {experts, 40}});
    for (int expert = 0; expert < experts; ++expert) {
      const std::string name = prefix + "block_sparse_moe.experts." + std::to_string(expert);
      tensors.push_back({name + ".w1.weight", DType::bf16, {70, 40}});
      tensors.push_back({name + ".w2.weight", DType::bf16, {40, 70}});
      tensors.push_back({name + ".w3.weight", DType::bf16, {70, 40}});
    }
  }
  tensors.push_back({"model.norm.weight", DType::bf16, {40}});
  tensors.push_back({"lm_head.weight", DType::bf16, {101, 40}});
  return model;
}

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#include "tests/support/models.hpp"

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
  model.config = R"({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 48})";
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

inspect::DemoModel bert() {
  return inspect::bert_model({.layers = 3, .prefix = true});
}

inspect::DemoModel mixtral(int layers, int experts) {
  inspect::DemoModel model;
  model.config = R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 40})";
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

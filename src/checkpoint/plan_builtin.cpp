// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism as Megatron cuts it: a layer's first matrices by rows (their outputs, biases with them), its last
// one by columns (its inputs; the bias is added once, so all ranks have it). Leading stars let a plan fit a model with
// and without a head, whose names differ by a prefix.

#include "src/checkpoint/plan_builtin.hpp"

#include <array>

namespace muster {
namespace {

// Llama, Mistral, Qwen2, Qwen3, Gemma: models of that pattern. Tied heads have no lm_head.
constexpr std::string_view llama = R"json({
  "muster_plan": 1,
  "rules": [
    {"match": "*embed_tokens.weight", "action": "concat", "dim": 0},
    {"match": "*lm_head.{weight,bias}", "action": "concat", "dim": 0},
    {"match": "*.self_attn.{q,k,v}_proj.{weight,bias}", "action": "concat", "dim": 0},
    {"match": "*.self_attn.o_proj.weight", "action": "concat", "dim": 1},
    {"match": "*.self_attn.o_proj.bias", "action": "same"},
    {"match": "*.mlp.{gate,up}_proj.{weight,bias}", "action": "concat", "dim": 0},
    {"match": "*.mlp.down_proj.weight", "action": "concat", "dim": 1},
    {"match": "*.mlp.down_proj.bias", "action": "same"},
    {"match": "*norm.{weight,bias}", "action": "same"},
    {"match": "*rotary_emb.inv_freq", "action": "same"}
  ]
})json";

// BERT and what was made of it, with its heads.
constexpr std::string_view bert = R"json({
  "muster_plan": 1,
  "rules": [
    {"match": "*embeddings.word_embeddings.weight", "action": "concat", "dim": 0},
    {"match": "*embeddings.{position,token_type}_embeddings.weight", "action": "same"},
    {"match": "*embeddings.{position,token_type}_ids", "action": "same"},
    {"match": "*LayerNorm.{weight,bias,gamma,beta}", "action": "same"},
    {"match": "*.attention.self.{query,key,value}.{weight,bias}", "action": "concat", "dim": 0},
    {"match": "*.intermediate.dense.{weight,bias}", "action": "concat", "dim": 0},
    {"match": "*.output.dense.weight", "action": "concat", "dim": 1},
    {"match": "*.output.dense.bias", "action": "same"},
    {"match": "*pooler.dense.{weight,bias}", "action": "same"},
    {"match": "*cls.predictions.decoder.{weight,bias}", "action": "concat", "dim": 0},
    {"match": "*cls.predictions.bias", "action": "concat", "dim": 0},
    {"match": "*cls.predictions.transform.dense.{weight,bias}", "action": "same"},
    {"match": "*cls.seq_relationship.{weight,bias}", "action": "same"},
    {"match": "*{classifier,qa_outputs}.{weight,bias}", "action": "same"}
  ]
})json";

constexpr std::array plans = {BuiltinPlan{"bert", bert}, BuiltinPlan{"llama", llama}};

}  // namespace

std::span<const BuiltinPlan> builtin_plans() noexcept {
  return plans;
}

}  // namespace muster

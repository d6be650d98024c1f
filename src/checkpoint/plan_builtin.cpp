// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism as Megatron cuts it: a layer's first matrices by rows (their outputs, biases with them), its last
// one by columns (its inputs; the bias is added once, so all ranks have it). Leading stars let a plan fit a model with
// and without a head, whose names differ by a prefix.
//
// Every matrix may be quantised. The scales' names are those of ModelOpt's checkpoints (weight_scale, weight_scale_2,
// input_scale, pre_quant_scale, k_scale, v_scale), of block-quantised ones as DeepSeek publishes them
// (weight_scale_inv), and of ModelOpt's states (weight_quantizer._amax, input_quantizer._pre_quant_scale ...). How they
// are cut is what ModelOpt's export/postprocess.py and quantization/plugins/megatron.py do: the scale of a weight like
// the weight where it has an element a row or a block, else one for all; a pre-quantisation scale has an element an
// input channel, so that it is cut where the inputs are.

#include "src/checkpoint/plan_builtin.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <vector>

#include "muster/plan.hpp"

namespace muster {
namespace {

constexpr std::array<std::string_view, 4> names = {"bert", "gpt-neox", "llama", "moe"};

// What all rules of a group of matrices have beside their action.
struct More {
  std::string_view stage = {};
  std::string_view blocks = {};  // of fused ones: JSON
  std::string_view heads = {};   // of attention, in place of blocks: JSON
};

// Puts the rules of a plan together. `modules` are patterns of modules' names; each rule adds what hangs on them.
class Text {
 public:
  Text& rule(const std::string& match, std::string_view action) {
    rules_ += fmt::format("{}\n    {{\"match\": \"{}\", {}}}", rules_.empty() ? "" : ",", match, action);
    return *this;
  }

  /// Matrices whose rows (outputs) the ranks share.
  Text& by_rows(const std::string& modules, const More& more = {}) {
    const std::string stage = more.stage.empty() ? "" : fmt::format(R"(, "stage": "{}")", more.stage);
    const std::string blocks = !more.heads.empty()    ? fmt::format(R"(, "heads": {})", more.heads)
                               : !more.blocks.empty() ? fmt::format(R"(, "blocks": {})", more.blocks)
                                                      : "";
    rule(modules + ".{weight,bias}", R"("action": "concat", "dim": 0)" + blocks + stage);
    rule(modules + ".{weight_scale*,weight_quantizer.*,output_scale,output_quantizer.*}",
         R"("action": "scale", "dim": 0)" + blocks + stage);
    rule(modules + ".{pre_quant_scale,input_quantizer._pre_quant_scale}", R"("action": "same")" + stage);
    return rule(modules + ".{input_scale*,input_quantizer.*}", R"("action": "scale")" + stage);
  }

  /// Matrices whose columns (inputs) the ranks share.
  Text& by_columns(const std::string& modules, const More& more = {}) {
    const std::string heads = more.heads.empty() ? "" : fmt::format(R"(, "heads": {})", more.heads);
    rule(modules + ".weight", R"("action": "concat", "dim": 1)" + heads);
    rule(modules + ".bias", R"("action": "same")");
    rule(modules + ".{weight_scale*,weight_quantizer.*}", R"("action": "scale", "dim": 1)" + heads);
    rule(modules + ".{pre_quant_scale,input_quantizer._pre_quant_scale}", R"("action": "concat", "dim": -1)" + heads);
    rule(modules + ".{input_scale*,input_quantizer.*}", R"("action": "scale", "dim": -1)");
    return rule(modules + ".{output_scale,output_quantizer.*}", R"("action": "scale")");
  }

  /// Matrices that every rank has whole.
  Text& on_all(const std::string& modules) {
    rule(modules + ".{weight,bias,weight_scale*,weight_quantizer.*,pre_quant_scale,input_quantizer._pre_quant_scale}",
         R"("action": "same")");
    return rule(modules + ".{input_scale*,input_quantizer.*,output_scale,output_quantizer.*}", R"("action": "scale")");
  }

  /// What quantised keys, values and attention probabilities have: one scale, or one a head.
  Text& key_value_cache() {
    const std::string of_keys = R"("action": "scale", "dim": 0, "heads": "num_key_value_heads")";
    const std::string of_queries = R"("action": "scale", "dim": 0, "heads": "num_attention_heads")";
    rule("*.{k,v}_proj.{k,v}_{scale,bias}", of_keys);
    rule("*.{self_attn,attention}.{attn.,}{k,v,kv}_scale", of_keys);
    rule("*.{self_attn,attention}.{attn.,}{q,prob}_scale", of_queries);
    rule("*.{k_bmm,v_bmm}_quantizer.*", of_keys);
    return rule("*.{q_bmm,p_bmm,softmax,bmm2_output}_quantizer.*", of_queries);
  }

  [[nodiscard]] std::string plan(std::string_view comment, std::string_view numbering) const {
    return fmt::format("{{\n  \"muster_plan\": 1,\n  \"comment\": \"{}\",\n  {},\n  \"rules\": [{}\n  ]\n}}\n", comment,
                       numbering, rules_);
  }

 private:
  std::string rules_;
};

constexpr std::string_view query_heads = R"("num_attention_heads")";
constexpr std::string_view key_heads = R"("num_key_value_heads")";
// Query, key and value heads in one matrix, as vLLM fuses them. (GPT-NeoX goes head by head instead.)
constexpr std::string_view fused_heads = R"(["num_attention_heads", "num_key_value_heads", "num_key_value_heads"])";
constexpr std::string_view layers = R"("layers": {"match": "*layers.#.*", "renumber": true})";

// Embeddings and head, tied or not, with the last norm. Tied heads have no tensor.
void ends_of_decoder(Text& text) {
  text.rule("*embed_tokens.weight", R"("action": "concat", "dim": 0, "stage": "first")");
  text.by_rows("*lm_head", {.stage = "last"});
  text.rule("*norm.{weight,bias}", R"("action": "same", "stage": "last")");
  text.rule("*rotary_emb.inv_freq", R"("action": "same", "stage": "all")");
}

// Decoders with separate or fused projections: Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, GLM-4; fc1 and fc2 are
// Phi-2's, c_fc and c_proj Starcoder2's.
std::string llama() {
  Text text;
  text.by_rows("*.self_attn.q_proj", {.heads = query_heads});
  text.by_rows("*.self_attn.{k_proj,v_proj}", {.heads = key_heads});
  text.by_rows("*.self_attn.qkv_proj", {.heads = fused_heads});
  text.by_columns("*.self_attn.{o_proj,dense}", {.heads = query_heads});
  text.by_rows("*.mlp.{gate_proj,up_proj,fc1,c_fc}");
  text.by_columns("*.mlp.{down_proj,fc2,c_proj}");
  text.by_rows("*.mlp.gate_up_proj", {.blocks = "[1, 1]"});
  text.key_value_cache();
  ends_of_decoder(text);
  return text.plan("Llama and the decoders of its pattern", layers);
}

// GPT-NeoX and Pythia: each head's query, key and value lie together, so that slices of whole heads are a plain concat.
std::string gpt_neox() {
  Text text;
  text.by_rows("*.attention.query_key_value", {.heads = query_heads});
  text.by_columns("*.attention.dense", {.heads = query_heads});
  text.by_rows("*.mlp.dense_h_to_4h");
  text.by_columns("*.mlp.dense_4h_to_h");
  text.rule("*.attention.dense_bias", R"("action": "same")");
  text.key_value_cache();
  text.rule("*embed_in.weight", R"("action": "concat", "dim": 0, "stage": "first")");
  text.by_rows("*embed_out", {.stage = "last"});
  text.rule("*norm.{weight,bias}", R"("action": "same", "stage": "last")");
  // Buffers that older checkpoints carry along.
  text.rule("*.attention.{bias,masked_bias,rotary_emb.inv_freq}", R"("action": "same", "stage": "all")");
  return text.plan("GPT-NeoX, Pythia", layers);
}

// BERT and what was made of it, with its heads: RoBERTa, CamemBERT, XLM-RoBERTa, ELECTRA, DistilBERT.
std::string bert() {
  Text text;
  text.by_rows("*.attention.{self.query,self.key,self.value,q_lin,k_lin,v_lin}", {.heads = query_heads});
  text.by_columns("*.attention.{output.dense,out_lin}", {.heads = query_heads});
  text.by_rows("*.{intermediate.dense,ffn.lin1}");
  text.by_columns("*.{output.dense,ffn.lin2}");
  text.key_value_cache();
  text.rule("*embeddings.word_embeddings.weight", R"("action": "concat", "dim": 0, "stage": "first")");
  text.rule("*embeddings.{position,token_type}_embeddings.weight", R"("action": "same", "stage": "first")");
  text.rule("*embeddings.{position,token_type}_ids", R"("action": "same", "stage": "first")");
  text.rule("*embeddings.LayerNorm.{weight,bias,gamma,beta}", R"("action": "same", "stage": "first")");
  text.rule("*embeddings_project.{weight,bias}", R"("action": "same", "stage": "first")");
  text.rule("*{LayerNorm,layer_norm}.{weight,bias,gamma,beta}", R"("action": "same", "stage": "last")");
  // Over the vocabulary, as the word embeddings that they are tied to.
  text.rule("*{cls.predictions.decoder,lm_head.decoder,generator_lm_head,vocab_projector}.{weight,bias}",
            R"("action": "concat", "dim": 0, "stage": "last")");
  text.rule("*{cls.predictions,lm_head}.bias", R"("action": "concat", "dim": 0, "stage": "last")");
  text.rule(
      "*{pooler.dense,cls.predictions.transform.dense,cls.seq_relationship,lm_head.dense,vocab_transform,"
      "generator_predictions.dense,discriminator_predictions.dense,discriminator_predictions.dense_prediction,"
      "pre_classifier,classifier,classifier.dense,classifier.out_proj,qa_outputs}.{weight,bias}",
      R"("action": "same", "stage": "last")");
  return text.plan("BERT and its descendants", R"("layers": {"match": "*layer.#.*", "renumber": true})");
}

// Mixtures of experts. Experts by number: Mixtral (w1, w2, w3), Qwen2-MoE and Qwen3-MoE, OLMoE, DeepSeek-V2 and -V3
// (with their compressed query, key and value, shared experts and the layer that predicts a second token); HuggingFace
// numbers experts through, so expert ranks do not renumber. Experts in one tensor: gpt-oss, Llama 4, Granite; expert
// ranks have some of them each, and tensor ranks all that their expert rank has.
std::string moe() {
  Text text;
  text.by_rows("*layers.*.{q_proj,q_b_proj,kv_b_proj}", {.heads = query_heads});
  text.by_rows("*layers.*.{k_proj,v_proj}", {.heads = key_heads});
  text.by_columns("*layers.*.o_proj", {.heads = query_heads});
  text.by_rows("*layers.*.{gate_proj,up_proj,w1,w3,shared_head.head}");
  text.by_columns("*layers.*.{down_proj,w2}");
  text.on_all(
      "*layers.*.{mlp.gate,mlp.router,feed_forward.router,block_sparse_moe.gate,block_sparse_moe.router.layer,"
      "shared_expert_gate,q_a_proj,kv_a_proj_with_mqa,eh_proj}");
  text.rule("*e_score_correction_bias", R"("action": "same")");
  text.rule("*.self_attn.sinks", R"("action": "concat", "dim": 0, "heads": "num_attention_heads")");
  text.rule("*.experts.{gate_up_proj,down_proj}{,_bias,_blocks,_scales}",
            R"("action": "concat", "dim": 0, "across": "expert")");
  text.rule("*.experts.{gate_up_proj,down_proj}_{weight_scale*,input_scale*,weight_quantizer.*,input_quantizer.*}",
            R"("action": "scale", "dim": 0, "across": "expert")");
  text.rule("*.block_sparse_moe.{input,output}_linear.weight", R"("action": "concat", "dim": 0, "across": "expert")");
  text.key_value_cache();
  ends_of_decoder(text);
  return text.plan("Mixtures of experts", fmt::format(R"({},
  "experts": {{"match": "*experts.#.*", "renumber": false}})",
                                                      layers));
}

}  // namespace

const BuiltinPlan* find_builtin_plan(std::string_view name) {
  static const std::vector<BuiltinPlan> plans = {
      {names[0], bert()}, {names[1], gpt_neox()}, {names[2], llama()}, {names[3], moe()}};
  const auto found = std::find_if(plans.begin(), plans.end(), [&](const BuiltinPlan& p) { return p.name == name; });
  return found == plans.end() ? nullptr : &*found;
}

std::span<const std::string_view> MergePlan::builtin_names() noexcept {
  return names;
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/plan_samples.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/support/checkpoints.hpp"

namespace muster::test::samples {

Matrix pick(const Matrix& from, std::int64_t rows, std::int64_t columns,
            const std::function<std::pair<std::int64_t, std::int64_t>(std::int64_t, std::int64_t)>& where) {
  Matrix out{rows, columns, {}, from.is_vector};
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto [y, x] = where(r, c);
      out.values.push_back(y < from.rows && x < from.columns ? from.at(y, x) : 0.0F);
    }
  return out;
}
Matrix rows_of_rank(const Matrix& m, int rank, int ranks) {
  const std::int64_t share = (m.rows + ranks - 1) / ranks;
  return pick(m, share, m.columns, [&](auto r, auto c) { return std::pair(rank * share + r, c); });
}
Matrix columns_of_rank(const Matrix& m, int rank, int ranks) {
  const std::int64_t share = m.columns / ranks;
  return pick(m, m.rows, share, [&](auto r, auto c) { return std::pair(r, rank * share + c); });
}
namespace {

Matrix below(const std::vector<Matrix>& parts) {
  Matrix out{0, parts.front().columns, {}, parts.front().is_vector};
  for (const Matrix& part : parts) {
    out.rows += part.rows;
    out.values.insert(out.values.end(), part.values.begin(), part.values.end());
  }
  return out;
}

const char* const config_text =
    R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4,
"head_dim": 4, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2})";

}  // namespace

Matrix filled(std::int64_t rows, std::int64_t columns, int salt, bool is_vector) {
  Matrix m{rows, columns, {}, is_vector};
  for (std::int64_t i = 0; i < rows * columns; ++i) m.values.push_back(static_cast<float>(salt * 4096 + i));
  return m;
}

Model model(bool of_experts) {
  Model all;
  int salt = 1;
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t columns, bool is_vector = false) {
    all[name] = filled(rows, columns, salt++, is_vector);
  };
  add("model.embed_tokens.weight", vocabulary, hidden);
  for (int layer = 0; layer < layers; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    add(at + "self_attn.q_proj.weight", heads * head, hidden);
    add(at + "self_attn.k_proj.weight", groups * head, hidden);
    add(at + "self_attn.v_proj.weight", groups * head, hidden);
    add(at + "self_attn.q_proj.bias", heads * head, 1, true);
    add(at + "self_attn.k_proj.bias", groups * head, 1, true);
    add(at + "self_attn.v_proj.bias", groups * head, 1, true);
    add(at + "self_attn.o_proj.weight", hidden, heads * head);
    add(at + "input_layernorm.weight", hidden, 1, true);
    add(at + "post_attention_layernorm.weight", hidden, 1, true);
    if (of_experts) {
      add(at + "mlp.gate.weight", experts, hidden);
      for (int expert = 0; expert < experts; ++expert) {
        const std::string mlp = at + "mlp.experts." + std::to_string(expert) + ".";
        add(mlp + "gate_proj.weight", inner, hidden);
        add(mlp + "up_proj.weight", inner, hidden);
        add(mlp + "down_proj.weight", hidden, inner);
      }
    } else {
      add(at + "mlp.gate_proj.weight", inner, hidden);
      add(at + "mlp.up_proj.weight", inner, hidden);
      add(at + "mlp.down_proj.weight", hidden, inner);
    }
  }
  add("model.norm.weight", hidden, 1, true);
  add("lm_head.weight", vocabulary, hidden);
  return all;
}

Tensor tensor_of(const Matrix& m) {
  Tensor tensor = Tensor::allocate(DType::f32, m.is_vector ? Shape{m.rows} : Shape{m.rows, m.columns});
  std::memcpy(tensor.mutable_data(), m.values.data(), tensor.nbytes());
  return tensor;
}

void write_model(const Model& model, const std::string& file) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, matrix] : model) tensors.push_back({name, tensor_of(matrix)});
  test::write_tensors(file, tensors);
}

void write_config(const std::string& directory) {
  std::filesystem::create_directory(directory);
  std::ofstream(directory + "/config.json") << config_text;
}

Matrix query_key_value_by_groups(const Model& model, const std::string& at, const std::string& kind, int rank,
                                 int ranks) {
  std::vector<Matrix> parts;
  const std::int64_t mine = groups / ranks;
  for (std::int64_t group = rank * mine; group < (rank + 1) * mine; ++group) {
    const auto take = [&](const std::string& name, std::int64_t count) {
      const Matrix& m = model.at(at + "self_attn." + name + "_proj." + kind);
      parts.push_back(
          pick(m, count * head, m.columns, [&](auto r, auto c) { return std::pair(group * count * head + r, c); }));
    };
    const Matrix& queries = model.at(at + "self_attn.q_proj." + kind);
    if (queries.rows == heads * head) {
      take("q", heads / groups);
    } else {
      // A group has all its queries, then all its gates. A Hugging Face head has its query and its gate.
      for (const std::int64_t gate : {0, 1})
        parts.push_back(pick(queries, heads / groups * head, queries.columns, [&](auto r, auto c) {
          return std::pair(((group * heads / groups + r / head) * 2 + gate) * head + r % head, c);
        }));
    }
    take("k", 1);
    take("v", 1);
  }
  return below(parts);
}

namespace {

/// The layout of vLLM and TensorRT-LLM: if there are fewer heads than ranks, each rank has one.
Matrix query_key_value_by_heads(const Model& model, const std::string& at, const std::string& kind, int rank,
                                int ranks) {
  std::vector<Matrix> parts = {rows_of_rank(model.at(at + "self_attn.q_proj." + kind), rank, ranks)};
  const int of_keys = std::min(ranks, static_cast<int>(groups));
  for (const char* name : {"k", "v"})
    parts.push_back(
        rows_of_rank(model.at(at + "self_attn." + name + "_proj." + kind), rank / (ranks / of_keys), of_keys));
  return below(parts);
}

Matrix gate_and_up(const Model& model, const std::string& at, int rank, int ranks) {
  return below({rows_of_rank(model.at(at + "gate_proj.weight"), rank, ranks),
                rows_of_rank(model.at(at + "up_proj.weight"), rank, ranks)});
}

}  // namespace

std::string layer_of(int layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

Files megatron(const Model& model, const ParallelLayout& layout, bool of_experts) {
  Files files;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto [t, p, e] = layout.coordinates(rank);
    Model mine;
    const int tp = layout.tensor;
    if (p == 0) mine["embedding.word_embeddings.weight"] = rows_of_rank(model.at("model.embed_tokens.weight"), t, tp);
    const int count = layers / layout.pipeline;
    for (int i = 0; i < count; ++i) {
      const std::string at = layer_of(p * count + i);
      const std::string to = "decoder.layers." + std::to_string(i) + ".";
      for (const std::string kind : {"weight", "bias"})
        mine[to + "self_attention.linear_qkv." + kind] = query_key_value_by_groups(model, at, kind, t, tp);
      mine[to + "self_attention.linear_proj.weight"] = columns_of_rank(model.at(at + "self_attn.o_proj.weight"), t, tp);
      mine[to + "self_attention.linear_qkv.layer_norm_weight"] = model.at(at + "input_layernorm.weight");
      if (!of_experts) {
        mine[to + "mlp.linear_fc1.layer_norm_weight"] = model.at(at + "post_attention_layernorm.weight");
        mine[to + "mlp.linear_fc1.weight"] = gate_and_up(model, at + "mlp.", t, tp);
        mine[to + "mlp.linear_fc2.weight"] = columns_of_rank(model.at(at + "mlp.down_proj.weight"), t, tp);
        continue;
      }
      mine[to + "pre_mlp_layernorm.weight"] = model.at(at + "post_attention_layernorm.weight");
      mine[to + "mlp.router.weight"] = model.at(at + "mlp.gate.weight");
      if (const auto gate = model.find(at + "mlp.shared_expert_gate.weight"); gate != model.end()) {
        const std::string shared = at + "mlp.shared_expert.";
        mine[to + "mlp.shared_experts.gate_weight"] = gate->second;
        mine[to + "mlp.shared_experts.linear_fc1.weight"] = gate_and_up(model, shared, t, tp);
        mine[to + "mlp.shared_experts.linear_fc2.weight"] =
            columns_of_rank(model.at(shared + "down_proj.weight"), t, tp);
      }
      const int of_rank = experts / layout.expert;
      for (int expert = 0; expert < of_rank; ++expert) {
        const std::string from = at + "mlp.experts." + std::to_string(e * of_rank + expert) + ".";
        mine[to + "mlp.experts.linear_fc1.weight" + std::to_string(expert)] = gate_and_up(model, from, t, tp);
        mine[to + "mlp.experts.linear_fc2.weight" + std::to_string(expert)] =
            columns_of_rank(model.at(from + "down_proj.weight"), t, tp);
      }
    }
    if (p == layout.pipeline - 1) {
      mine["decoder.final_layernorm.weight"] = model.at("model.norm.weight");
      mine["output_layer.weight"] = rows_of_rank(model.at("lm_head.weight"), t, tp);
    }
    files.push_back(std::move(mine));
  }
  return files;
}

Files megatron_of_parts(const Model& model, const ParallelLayout& layout, bool of_experts) {
  Files files = megatron(model, {}, of_experts);
  const Model whole = std::move(files.front());
  files.clear();
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    Model mine = whole;
    for (auto& [name, matrix] : mine) {
      if (name.ends_with("linear_proj.weight") || name.ends_with("linear_fc2.weight"))
        matrix = columns_of_rank(matrix, rank, layout.tensor);
      else if (name.ends_with("linear_fc1.weight"))
        matrix =
            gate_and_up(model, layer_of(name.find(".0.") == std::string::npos ? 1 : 0) + "mlp.", rank, layout.tensor);
      else if (!name.ends_with("norm_weight") && !name.ends_with("norm.weight"))
        matrix = rows_of_rank(matrix, rank, layout.tensor);
    }
    files.push_back(std::move(mine));
  }
  return files;
}

namespace {

Model renamed(const Model& model, const std::vector<std::pair<std::string, std::string>>& words, bool backwards) {
  Model other;
  for (const auto& [name, matrix] : model) {
    std::string to = name;
    for (const auto& word : words) {
      const std::string& from = backwards ? word.second : word.first;
      if (const std::size_t at = to.find(from); at != std::string::npos)
        to.replace(at, from.size(), backwards ? word.first : word.second);
    }
    other[to] = matrix;
  }
  return other;
}

const std::vector<std::pair<std::string, std::string>> mixtral_words = {{"mlp.gate.", "block_sparse_moe.gate."},
                                                                        {"mlp.experts.", "block_sparse_moe.experts."},
                                                                        {"gate_proj.", "w1."},
                                                                        {"up_proj.", "w3."},
                                                                        {"down_proj.", "w2."}};

}  // namespace

Model mixtral(Model model) {
  return renamed(model, mixtral_words, false);
}

Files megatron_mixtral(const Model& model, const ParallelLayout& layout, bool of_experts) {
  return megatron(renamed(model, mixtral_words, true), layout, of_experts);
}

Model gated(Model model) {
  for (int layer = 0; layer < layers; ++layer) {
    const std::string at = layer_of(layer);
    model[at + "self_attn.q_proj.weight"] = filled(2 * heads * head, hidden, 100 + layer);
    model[at + "self_attn.q_proj.bias"] = filled(2 * heads * head, 1, 110 + layer, true);
    model[at + "mlp.shared_expert_gate.weight"] = filled(1, hidden, 120 + layer);
    model[at + "mlp.shared_expert.gate_proj.weight"] = filled(inner, hidden, 130 + layer);
    model[at + "mlp.shared_expert.up_proj.weight"] = filled(inner, hidden, 140 + layer);
    model[at + "mlp.shared_expert.down_proj.weight"] = filled(hidden, inner, 150 + layer);
  }
  return model;
}

namespace {

/// The number of values to which query, key and value are compressed.
constexpr std::int64_t compressed = 6;

}  // namespace

Model latent(Model model) {
  std::erase_if(model, [](const auto& item) {
    const std::string& name = item.first;
    return name.find("q_proj.") != std::string::npos || name.find("k_proj.") != std::string::npos ||
           name.find("v_proj.") != std::string::npos;
  });
  for (int layer = 0; layer < layers; ++layer) {
    const std::string at = layer_of(layer) + "self_attn.";
    model[at + "q_a_proj.weight"] = filled(compressed, hidden, 100 + layer);
    model[at + "q_a_layernorm.weight"] = filled(compressed, 1, 110 + layer, true);
    model[at + "q_b_proj.weight"] = filled(heads * head, compressed, 120 + layer);
    model[at + "kv_a_proj_with_mqa.weight"] = filled(compressed + 2, hidden, 130 + layer);
    model[at + "kv_a_layernorm.weight"] = filled(compressed, 1, 140 + layer, true);
    model[at + "kv_b_proj.weight"] = filled(heads * 2 * head, compressed, 150 + layer);
  }
  return model;
}

Files megatron_latent(const Model& model, const ParallelLayout& layout, bool of_experts) {
  Model with_heads = model;
  for (int layer = 0; layer < layers; ++layer)
    for (const char* part : {"q", "k", "v"})
      for (const char* kind : {"weight", "bias"})
        with_heads[layer_of(layer) + "self_attn." + part + "_proj." + kind] =
            filled((*part == 'q' ? heads : groups) * head, *kind == 'w' ? hidden : 1, 1, *kind == 'b');
  Files files = megatron(with_heads, layout, of_experts);
  const int count = layers / layout.pipeline;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    Model& mine = files[static_cast<std::size_t>(rank)];
    std::erase_if(mine, [](const auto& item) { return item.first.find("linear_qkv") != std::string::npos; });
    const auto [t, p, e] = layout.coordinates(rank);
    for (int i = 0; i < count; ++i) {
      const std::string at = layer_of(p * count + i);
      const std::string to = "decoder.layers." + std::to_string(i) + ".";
      const std::string attention = to + "self_attention.";
      mine[to + "input_layernorm.weight"] = model.at(at + "input_layernorm.weight");
      mine[attention + "linear_q_down_proj.weight"] = model.at(at + "self_attn.q_a_proj.weight");
      mine[attention + "linear_q_up_proj.layer_norm_weight"] = model.at(at + "self_attn.q_a_layernorm.weight");
      mine[attention + "linear_q_up_proj.weight"] =
          rows_of_rank(model.at(at + "self_attn.q_b_proj.weight"), t, layout.tensor);
      mine[attention + "linear_kv_down_proj.weight"] = model.at(at + "self_attn.kv_a_proj_with_mqa.weight");
      mine[attention + "linear_kv_up_proj.layer_norm_weight"] = model.at(at + "self_attn.kv_a_layernorm.weight");
      mine[attention + "linear_kv_up_proj.weight"] =
          rows_of_rank(model.at(at + "self_attn.kv_b_proj.weight"), t, layout.tensor);
    }
  }
  return files;
}

Files vllm(const Model& model, const ParallelLayout& layout, bool) {
  Files files;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const int tp = layout.tensor;
    Model mine;
    for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"})
      mine[name] = rows_of_rank(model.at(name), rank, tp);
    mine["model.norm.weight"] = model.at("model.norm.weight");
    for (int i = 0; i < layers; ++i) {
      const std::string at = layer_of(i);
      for (const std::string kind : {"weight", "bias"})
        mine[at + "self_attn.qkv_proj." + kind] = query_key_value_by_heads(model, at, kind, rank, tp);
      mine[at + "self_attn.o_proj.weight"] = columns_of_rank(model.at(at + "self_attn.o_proj.weight"), rank, tp);
      mine[at + "mlp.gate_up_proj.weight"] = gate_and_up(model, at + "mlp.", rank, tp);
      mine[at + "mlp.down_proj.weight"] = columns_of_rank(model.at(at + "mlp.down_proj.weight"), rank, tp);
      for (const char* norm : {"input_layernorm.weight", "post_attention_layernorm.weight"})
        mine[at + norm] = model.at(at + norm);
    }
    files.push_back(std::move(mine));
  }
  return files;
}

Files trtllm(const Model& model, const ParallelLayout& layout, bool) {
  Files files;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const auto [t, p, e] = layout.coordinates(rank);
    const int tp = layout.tensor;
    Model mine;
    if (p == 0) mine["transformer.vocab_embedding.weight"] = model.at("model.embed_tokens.weight");
    const int count = layers / layout.pipeline;
    for (int i = 0; i < count; ++i) {
      const std::string at = layer_of(p * count + i);
      const std::string to = "transformer.layers." + std::to_string(i) + ".";
      for (const std::string kind : {"weight", "bias"})
        mine[to + "attention.qkv." + kind] = query_key_value_by_heads(model, at, kind, t, tp);
      mine[to + "attention.dense.weight"] = columns_of_rank(model.at(at + "self_attn.o_proj.weight"), t, tp);
      mine[to + "mlp.fc.weight"] = rows_of_rank(model.at(at + "mlp.gate_proj.weight"), t, tp);
      mine[to + "mlp.gate.weight"] = rows_of_rank(model.at(at + "mlp.up_proj.weight"), t, tp);
      mine[to + "mlp.proj.weight"] = columns_of_rank(model.at(at + "mlp.down_proj.weight"), t, tp);
      mine[to + "input_layernorm.weight"] = model.at(at + "input_layernorm.weight");
      mine[to + "post_layernorm.weight"] = model.at(at + "post_attention_layernorm.weight");
    }
    if (p == layout.pipeline - 1) {
      mine["transformer.ln_f.weight"] = model.at("model.norm.weight");
      mine["lm_head.weight"] = rows_of_rank(model.at("lm_head.weight"), t, tp);
    }
    files.push_back(std::move(mine));
  }
  return files;
}

Files meta(const Model& model, const ParallelLayout& layout, bool) {
  // Row 2i + j of a head is row i of half j in the Hugging Face layout.
  const auto beside = [](const Matrix& m) {
    return pick(m, m.rows, m.columns, [](auto r, auto c) {
      const std::int64_t in_head = r % head;
      return std::pair(r - in_head + (in_head % 2) * (head / 2) + in_head / 2, c);
    });
  };
  Files files;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const int tp = layout.tensor;
    Model mine;
    mine["tok_embeddings.weight"] = rows_of_rank(model.at("model.embed_tokens.weight"), rank, tp);
    mine["output.weight"] = rows_of_rank(model.at("lm_head.weight"), rank, tp);
    mine["norm.weight"] = model.at("model.norm.weight");
    for (int i = 0; i < layers; ++i) {
      const std::string at = layer_of(i);
      const std::string to = "layers." + std::to_string(i) + ".";
      mine[to + "attention.wq.weight"] = rows_of_rank(beside(model.at(at + "self_attn.q_proj.weight")), rank, tp);
      mine[to + "attention.wk.weight"] = rows_of_rank(beside(model.at(at + "self_attn.k_proj.weight")), rank, tp);
      mine[to + "attention.wv.weight"] = rows_of_rank(model.at(at + "self_attn.v_proj.weight"), rank, tp);
      mine[to + "attention.wo.weight"] = columns_of_rank(model.at(at + "self_attn.o_proj.weight"), rank, tp);
      mine[to + "feed_forward.w1.weight"] = rows_of_rank(model.at(at + "mlp.gate_proj.weight"), rank, tp);
      mine[to + "feed_forward.w3.weight"] = rows_of_rank(model.at(at + "mlp.up_proj.weight"), rank, tp);
      mine[to + "feed_forward.w2.weight"] = columns_of_rank(model.at(at + "mlp.down_proj.weight"), rank, tp);
      mine[to + "attention_norm.weight"] = model.at(at + "input_layernorm.weight");
      mine[to + "ffn_norm.weight"] = model.at(at + "post_attention_layernorm.weight");
    }
    files.push_back(std::move(mine));
  }
  return files;
}

void erase_biases(Model& model) {
  std::erase_if(model, [](const auto& item) { return item.first.ends_with(".bias"); });
}

}  // namespace muster::test::samples

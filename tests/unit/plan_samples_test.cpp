// SPDX-License-Identifier: Apache-2.0
// Rank files of other programs, built from the formulas of their layouts, become a model in the Hugging Face layout,
// and back.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/load_shard.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using test::has;
using test::TemporaryDirectory;
using test::words_of;

namespace {

/// A matrix (or a vector of one column) of floats.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<float> values;
  bool is_vector = false;
  [[nodiscard]] const float& at(std::int64_t r, std::int64_t c) const {
    return values[static_cast<std::size_t>(r * columns + c)];
  }
};
using Model = std::map<std::string, Matrix>;

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
Matrix below(const std::vector<Matrix>& parts) {
  Matrix out{0, parts.front().columns, {}, parts.front().is_vector};
  for (const Matrix& part : parts) {
    out.rows += part.rows;
    out.values.insert(out.values.end(), part.values.begin(), part.values.end());
  }
  return out;
}

constexpr std::int64_t heads = 8;
constexpr std::int64_t groups = 4;
constexpr std::int64_t head = 4;
constexpr std::int64_t hidden = 16;
constexpr std::int64_t inner = 24;
constexpr std::int64_t vocabulary = 37;
constexpr int layers = 2;
constexpr int experts = 4;

const char* const config_text =
    R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4,
"head_dim": 4, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2})";

Matrix filled(std::int64_t rows, std::int64_t columns, int salt, bool is_vector = false) {
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

std::string layer_of(int layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

using Files = std::vector<Model>;

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

/// If the number of ranks is a multiple of the number of groups, each rank has a slice of the fused matrices, wherever
/// that cuts them.
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

/// The number of values to which query, key and value are compressed.
constexpr std::int64_t compressed = 6;

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

struct Sample {
  std::string plan;
  std::string layout;
  Files (*files)(const Model&, const ParallelLayout&, bool);
  bool of_experts = false;
  Model (*turned)(Model) = nullptr;  // of the model
};

void check_shard(const std::string& file, const std::vector<NamedTensor>& tensors) {
  const SafetensorsFile shard = SafetensorsFile::open(file);
  REQUIRE(tensors.size() == shard.tensors().size());
  for (const auto& [name, tensor] : tensors) {
    CAPTURE(name);
    REQUIRE(shard.find(name));
    CHECK(bitwise_equal(tensor, shard.tensor(name)));
  }
}

// Meta's models have no biases.
void erase_biases(Model& model) {
  std::erase_if(model, [](const auto& item) { return item.first.ends_with(".bias"); });
}

}  // namespace

TEST_CASE("ranks of other programs become a Hugging Face model, and the inverse") {
  const std::vector<Sample> samples = {
      {"megatron", "1", megatron},
      {"megatron", "2", megatron},
      {"megatron", "tp=4,pp=2", megatron},
      {"megatron-moe", "tp=2,pp=2,ep=2", megatron, true},
      {"megatron-mixtral", "tp=2,pp=1,ep=2", megatron_mixtral, true, mixtral},
      {"megatron-gated", "tp=2,pp=2,ep=2", megatron, true, gated},
      {"megatron-mla", "tp=2,pp=2", megatron_latent, true, latent},
      {"vllm", "2", vllm},
      {"vllm", "8", vllm},
      {"trtllm", "tp=2,pp=2", trtllm},
      {"trtllm", "8", trtllm},
      {"meta", "1", meta},
      {"meta", "4", meta},
  };
  for (const Sample& sample : samples) {
    CAPTURE(sample.plan);
    CAPTURE(sample.layout);
    const TemporaryDirectory temporary;
    const std::string given = temporary.path().string() + "/model";
    const std::string shards = temporary.path().string() + "/shards";
    write_config(given);
    write_config(shards);
    Model whole = model(sample.of_experts);
    if (sample.files == meta) erase_biases(whole);
    if (sample.turned != nullptr) whole = sample.turned(std::move(whole));
    write_model(whole, given + "/model.safetensors");
    const ParallelLayout layout = ParallelLayout::parse(sample.layout);
    const Files files = sample.files(whole, layout, sample.of_experts);
    for (int rank = 0; rank < layout.ranks(); ++rank)
      write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, layout.ranks()));

    ExportOptions options;
    options.source_layout = layout;
    export_model(shards, temporary.path().string() + "/out", sample.plan, *single_group(), options);
    test::check_equal(given, temporary.path().string() + "/out");

    shard_model(given, temporary.path().string() + "/cut", layout, sample.plan);
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      CAPTURE(rank);
      const std::string name = "/" + shard_file_name(rank, layout.ranks());
      const SafetensorsFile wanted = SafetensorsFile::open(shards + name);
      const SafetensorsFile cut = SafetensorsFile::open(temporary.path().string() + "/cut" + name);
      std::map<std::string, std::size_t> places;
      for (std::size_t i = 0; i < cut.tensors().size(); ++i) places[cut.tensors()[i].name] = i;
      CHECK(places.size() == wanted.tensors().size());
      for (std::size_t i = 0; i < wanted.tensors().size(); ++i) {
        const std::string& tensor = wanted.tensors()[i].name;
        CAPTURE(tensor);
        REQUIRE(places.contains(tensor));
        CHECK(bitwise_equal(wanted.tensor(i), cut.tensor(places.at(tensor))));
      }
      for (const auto& [tensor, loaded] : load_shard(given, layout, rank, sample.plan))
        CHECK(bitwise_equal(loaded, cut.tensor(places.at(tensor))));
    }
    // Cuts the ranks for another layout by a plan with Hugging Face names. Each part is read directly from the given
    // ranks.
    const ParallelLayout two = ParallelLayout::parse(sample.of_experts ? "tp=2,pp=1,ep=2" : "tp=2,pp=2");
    const std::string plan = sample.of_experts ? "moe" : "llama";
    shard_model(given, temporary.path().string() + "/want", two, plan);
    const std::string named = sample.of_experts ? plan : "";  // config.json names llama, which is the choice of "auto"
    options.target_layout = two;
    options.to_plan = named;
    export_model(shards, temporary.path().string() + "/cut_anew", sample.plan, *single_group(), options);
    for (int rank = 0; rank < two.ranks(); ++rank) {
      const std::string name = "/" + shard_file_name(rank, two.ranks());
      const auto loaded = load_shard(shards, two, rank, sample.plan, {.source_layout = layout, .to_plan = named});
      check_shard(temporary.path().string() + "/want" + name, loaded);
      check_shard(temporary.path().string() + "/cut_anew" + name, loaded);
    }
    // Also by a plan with views, for another number of ranks of the same program.
    shard_model(given, temporary.path().string() + "/theirs", {.tensor = 2}, sample.plan);
    for (int rank = 0; rank < 2; ++rank)
      check_shard(
          temporary.path().string() + "/theirs/" + shard_file_name(rank, 2),
          load_shard(shards, {.tensor = 2}, rank, sample.plan, {.source_layout = layout, .to_plan = sample.plan}));
    // Cut and joined again, by the plan that the shards store.
    export_model(temporary.path().string() + "/cut", temporary.path().string() + "/again", "", *single_group());
    test::check_equal(given, temporary.path().string() + "/again");
  }
}

TEST_CASE(
    "TensorRT-LLM's embeddings are joined as the ranks' own config.json specifies, which the result does not contain") {
  struct Cut {
    const char* embedding;
    int dim;  ///< -1: all ranks have the whole tensor
  };
  const Model whole = model(false);
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2");
  for (const Cut& cut : {Cut{R"("use_parallel_embedding": true, "embedding_sharding_dim": 0,)", 0},
                         Cut{R"("use_parallel_embedding": true, "embedding_sharding_dim": 1,)", 1},
                         Cut{R"("use_parallel_embedding": true,)", 0},
                         Cut{R"("use_parallel_embedding": false, "embedding_sharding_dim": 1,)", -1}, Cut{"", -1}}) {
    CAPTURE(cut.embedding);
    const TemporaryDirectory temporary;
    const std::string at = temporary.path().string();
    const std::string given = at + "/model";
    const std::string ranks = at + "/ranks";
    write_config(given);
    write_config(ranks);
    write_model(whole, given + "/model.safetensors");
    std::ofstream(ranks + "/config.json")
        << R"({"architecture": "LlamaForCausalLM", "num_attention_heads": 8, "num_key_value_heads": 4, "head_size": 4,)"
        << R"("hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2,)" << cut.embedding
        << R"("mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}})";
    Files files = trtllm(whole, layout, false);
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      Model& mine = files[static_cast<std::size_t>(rank)];
      const auto embedding = mine.find("transformer.vocab_embedding.weight");
      const int t = layout.coordinates(rank).tensor;
      if (embedding != mine.end() && cut.dim == 0) embedding->second = rows_of_rank(embedding->second, t, 2);
      if (embedding != mine.end() && cut.dim == 1) embedding->second = columns_of_rank(embedding->second, t, 2);
      write_model(mine, ranks + "/rank" + std::to_string(rank) + ".safetensors");
    }
    ExportOptions options;
    options.base_model = given;
    export_model(ranks, at + "/out", "trtllm", *single_group(), options);
    test::check_equal(given, at + "/out");
    // Without a base the sizes come from the ranks, and there is no config.json for the output.
    const ExportReport alone = export_model(ranks, at + "/alone", "trtllm", *single_group());
    CHECK_FALSE(std::filesystem::exists(at + "/alone/config.json"));
    CHECK(test::tensors_of(at + "/alone").size() == whole.size());
    for (const auto& [name, tensor] : test::tensors_of(at + "/alone"))
      CHECK(bitwise_equal(tensor, tensor_of(whole.at(name))));
    std::string notes;
    for (const std::string& note : alone.manifest.notes) notes += note + "\n";
    CHECK(has(notes, "the sizes of the model are read from"));
    REQUIRE(alone.skipped.size() == 1);
    CHECK(alone.skipped.front().name == "config.json");
    CHECK(has(alone.skipped.front().reason, "--base-model"));
    options.base_model.clear();
    options.dtype = DType::bf16;
    export_model(ranks, at + "/cast", "trtllm", *single_group(), options);
    CHECK_FALSE(std::filesystem::exists(at + "/cast/config.json"));
    // Cut for another layout, with the same sizes.
    shard_model(given, at + "/want", {.tensor = 4}, "llama");
    shard_model(ranks, at + "/cut", {.tensor = 4}, "trtllm", {.to_plan = "llama"});
    CHECK_FALSE(std::filesystem::exists(at + "/cut/config.json"));
    for (int rank = 0; rank < 4; ++rank) {
      const SafetensorsFile file = SafetensorsFile::open(at + "/cut/" + shard_file_name(rank, 4));
      std::vector<NamedTensor> tensors;
      for (std::size_t i = 0; i < file.tensors().size(); ++i)
        tensors.emplace_back(file.tensors()[i].name, Tensor::copy_of(file.tensor(i)));
      check_shard(at + "/want/" + shard_file_name(rank, 4), tensors);
    }
  }
}

TEST_CASE("with more Megatron ranks than groups, each rank has a slice of a group") {
  const TemporaryDirectory temporary;
  const std::string given = temporary.path().string() + "/model";
  const std::string shards = temporary.path().string() + "/shards";
  write_config(given);
  write_config(shards);
  const Model whole = model(false);
  write_model(whole, given + "/model.safetensors");
  const ParallelLayout layout{.tensor = 8};
  const Files files = megatron_of_parts(whole, layout, false);
  for (int rank = 0; rank < 8; ++rank)
    write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, 8));
  export_model(shards, temporary.path().string() + "/out", "megatron", *single_group());
  test::check_equal(given, temporary.path().string() + "/out");
  shard_model(given, temporary.path().string() + "/want", {.tensor = 2}, "llama");
  check_shard(temporary.path().string() + "/want/" + shard_file_name(1, 2),
              load_shard(shards, {.tensor = 2}, 1, "megatron"));
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] { shard_model(given, temporary.path().string() + "/cut", layout, "megatron"); }),
            "8 ranks do not divide the 4 groups"));
}

TEST_CASE("scales of quantized matrices follow them, and scales that no plan knows are refused by name") {
  struct Case {
    const char* plan;
    Files (*files)(const Model&, const ParallelLayout&, bool);
    std::map<std::string, std::vector<std::string>>
        scales;  // scales with one element, in layer 0: their value in the result
    const char* unknown;
  };
  const std::string by_groups = "decoder.layers.0.self_attention.linear_qkv.weight_quantizer._amax";
  const std::vector<Case> cases = {
      {"trtllm",
       trtllm,
       {{"transformer.layers.0.attention.qkv.weights_scaling_factor",
         {"self_attn.q_proj.weight_scale", "self_attn.k_proj.weight_scale", "self_attn.v_proj.weight_scale"}},
        {"transformer.layers.0.attention.dense.activation_scaling_factor", {"self_attn.o_proj.input_scale"}},
        {"transformer.layers.0.mlp.fc.weights_scaling_factor", {"mlp.gate_proj.weight_scale"}},
        {"transformer.layers.0.mlp.gate.activation_scaling_factor", {"mlp.up_proj.input_scale"}},
        {"transformer.layers.0.mlp.proj.weights_scaling_factor", {"mlp.down_proj.weight_scale"}}},
       "transformer.layers.0.attention.qkv.prequant_scaling_factor"},
      {"megatron",
       megatron,
       {{"decoder.layers.0.self_attention.linear_qkv.input_quantizer._amax",
         {"self_attn.q_proj.input_quantizer._amax", "self_attn.k_proj.input_quantizer._amax",
          "self_attn.v_proj.input_quantizer._amax"}},
        {"decoder.layers.0.mlp.linear_fc1.weight_quantizer._amax",
         {"mlp.gate_proj.weight_quantizer._amax", "mlp.up_proj.weight_quantizer._amax"}},
        {"decoder.layers.0.mlp.linear_fc2.weight_quantizer._amax", {"mlp.down_proj.weight_quantizer._amax"}},
        {"decoder.layers.0.self_attention.linear_proj.input_quantizer._amax",
         {"self_attn.o_proj.input_quantizer._amax"}}},
       "decoder.layers.0.mlp.experts.linear_fc1.weight_quantizer._amax"}};
  for (const Case& each : cases) {
    CAPTURE(each.plan);
    const TemporaryDirectory temporary;
    const std::string shards = temporary.path().string() + "/shards";
    write_config(shards);
    Model whole = model(false);
    Files files = each.files(whole, {.tensor = 2}, false);
    const auto write = [&] {
      for (int rank = 0; rank < 2; ++rank)
        write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, 2));
    };
    const std::string at = layer_of(0);
    for (const auto& [name, parts] : each.scales) {
      for (Model& file : files) file[name] = filled(1, 1, 7, true);
      for (const std::string& part : parts) whole[at + part] = filled(1, 1, 7, true);
    }
    if (std::string(each.plan) == "megatron") {
      // One scale per row, in the order of the matrix rows.
      for (const char* part : {"q", "k", "v"})
        whole[at + "self_attn." + part + "_proj.weight_quantizer._amax"] =
            pick(whole.at(at + "self_attn." + part + "_proj.weight"), (*part == 'q' ? heads : groups) * head, 1,
                 [](auto r, auto c) { return std::pair(r, c); });
      for (int rank = 0; rank < 2; ++rank)
        files[static_cast<std::size_t>(rank)][by_groups] =
            query_key_value_by_groups(whole, at, "weight_quantizer._amax", rank, 2);
    }
    write();
    export_model(shards, temporary.path().string() + "/out", each.plan, *single_group());
    const auto tensors = test::tensors_of(temporary.path().string() + "/out");
    CHECK(tensors.size() == whole.size());
    for (const auto& [name, matrix] : whole) {
      CAPTURE(name);
      REQUIRE(tensors.contains(name));
      CHECK(bitwise_equal(tensors.at(name), tensor_of(matrix)));
    }
    for (Model& file : files) file[each.unknown] = filled(1, 1, 7, true);
    write();
    const std::string words = words_of(ErrorKind::invalid_argument, [&] { plan_export(shards, each.plan); });
    CHECK(has(words, "no rule"));
    CHECK(has(words, "quant"));
  }
}

TEST_CASE(
    "8-bit floats whose blocks do not divide between ranks: each rank has all scales, and knows its first block") {
  const TemporaryDirectory temporary;
  const std::string given = temporary.path().string() + "/model";
  write_config(given);
  std::vector<NamedTensor> tensors;
  const auto add = [&](const std::string& name, DType dtype, const Shape& shape) {
    Tensor tensor = Tensor::allocate(dtype, shape);
    for (std::uint64_t i = 0; i < tensor.nbytes(); ++i)
      tensor.mutable_data()[i] = static_cast<std::byte>((i * 7 + tensors.size()) % 120);
    tensors.emplace_back(name, tensor);
  };
  const std::string at = "model.layers.0.mlp.";
  for (const auto& [name, rows, columns] :
       {std::tuple("gate_proj", 320, 160), std::tuple("up_proj", 512, 160), std::tuple("down_proj", 160, 320)}) {
    add(at + name + ".weight", DType::f8_e4m3fn, {rows, columns});
    add(at + name + ".weight_scale_inv", DType::f32, {(rows + 127) / 128, (columns + 127) / 128});
  }
  test::write_tensors(given + "/model.safetensors", tensors);
  std::ofstream(given + "/config.json") << "{}";
  for (const int ranks : {2, 4, 6}) {
    CAPTURE(ranks);
    const std::string to = temporary.path().string() + "/" + std::to_string(ranks);
    const ShardReport report = shard_model(given, to, {.tensor = ranks}, "llama");
    CHECK(has(report.notes.at(0), "every rank has the whole tensor"));
    const SafetensorsFile last = SafetensorsFile::open(to + "/" + shard_file_name(ranks - 1, ranks));
    const auto facts = parse_shard_facts(last.metadata());
    REQUIRE(facts);
    CHECK(facts->blocked.contains(at + "up_proj.weight_scale_inv") == (ranks == 6));
    const std::int64_t part = (320 + ranks - 1) / ranks;
    CHECK(facts->blocked.at(at + "gate_proj.weight_scale_inv") == BlockedPart{0, (ranks - 1) * part, 128});
    CHECK(facts->blocked.at(at + "down_proj.weight_scale_inv") == BlockedPart{1, (ranks - 1) * part, 128});
    CHECK(bitwise_equal(last.tensor(at + "gate_proj.weight_scale_inv"), tensors[1].second));
    export_model(to, to + "-whole", "", *single_group());
    test::check_equal(given, to + "-whole");
    export_model(to, to + "-anew", "", *single_group(), {.target_layout = ParallelLayout{.tensor = 3}});
    export_model(to + "-anew", to + "-again", "", *single_group());
    test::check_equal(given, to + "-again");
  }
}

TEST_CASE("a model in safetensors files of any name is accepted, and so is a single file") {
  const TemporaryDirectory temporary(test::Medium::memory);
  const std::string at = temporary.path().string();
  Model whole = model(false);
  erase_biases(whole);
  write_config(at + "/given");
  write_model(whole, at + "/given/model.safetensors");
  std::filesystem::create_directory(at + "/mistral");
  std::ofstream(at + "/mistral/params.json") << "{}";
  write_model(meta(whole, {}, false).front(), at + "/mistral/consolidated.safetensors");
  for (const std::string source : {"/mistral", "/mistral/consolidated.safetensors"}) {
    CAPTURE(source);
    const std::string out = at + "/of" + std::to_string(source.size());
    ExportOptions options;
    options.base_model = at + "/given";
    export_model(at + source, out, "meta", *single_group(), options);
    test::check_equal(at + "/given", out);
  }
  ShardOptions with_base;
  with_base.base_model = at + "/given";
  shard_model(at + "/given/model.safetensors", at + "/shards", {.tensor = 2}, "llama", with_base);
  export_model(at + "/shards", at + "/again", "", *single_group());
  write_config(at + "/again");  // a single file has no config.json beside it
  test::check_equal(at + "/given", at + "/again");
  // A rank's shard is not a model.
  CHECK_THROWS_AS(export_model(at + "/shards/" + shard_file_name(0, 2), at + "/no", "", *single_group()), Error);
}

TEST_CASE("an export casts and selects, and a number that would become infinite ends it without any output") {
  const TemporaryDirectory temporary;
  const std::string shards = temporary.path().string() + "/shards";
  write_config(shards);
  Model whole = model(false);
  write_model(vllm(whole, {}, false).front(), shards + "/" + shard_file_name(0, 1));
  ExportOptions options;
  options.dtype = DType::bf16;
  options.exclude = "lm_head.*";
  const ExportReport report =
      export_model(shards, temporary.path().string() + "/out", "vllm", *single_group(), options);
  CHECK(report.manifest.dropped.size() == 1);
  CHECK(report.manifest.dropped.front().reason == "it was not selected");
  const auto tensors = test::tensors_of(temporary.path().string() + "/out");
  CHECK_FALSE(tensors.contains("lm_head.weight"));
  const Tensor& keys = tensors.at("model.layers.1.self_attn.k_proj.weight");
  CHECK(keys.dtype() == DType::bf16);
  const float first = whole.at("model.layers.1.self_attn.k_proj.weight").at(0, 0);
  std::uint16_t stored = 0;
  std::memcpy(&stored, keys.data(), 2);
  CHECK(std::abs(std::bit_cast<float>(std::uint32_t{stored} << 16) - first) <= first / 256);

  options.dtype = DType::f16;
  CHECK(
      has(words_of(ErrorKind::invalid_argument,
                   [&] { export_model(shards, temporary.path().string() + "/no", "vllm", *single_group(), options); }),
          "is finite and would become infinite"));
  CHECK_FALSE(std::filesystem::exists(temporary.path().string() + "/no"));
  options.select = "no such*";
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { plan_export(shards, "vllm", options); }),
            "no tensor matches --select"));
}

TEST_CASE("a head that is tied to the embeddings is compared and left out; a different one ends the export") {
  const TemporaryDirectory temporary;
  Model whole = model(false);
  whole["lm_head.weight"] = whole["model.embed_tokens.weight"];
  const std::string plan = temporary.path().string() + "/plan.json";
  std::ofstream(plan) << R"({"muster_plan": 1, "extends": "megatron", "rules": [
      {"match": "lm_head.weight", "action": "tie", "with": "model.embed_tokens.weight"}]})";
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2");
  for (const bool is_equal : {true, false}) {
    const std::string shards = temporary.path().string() + (is_equal ? "/equal" : "/other");
    write_config(shards);
    if (!is_equal) whole["lm_head.weight"].values.back() += 1;
    const Files files = megatron(whole, layout, false);
    for (int rank = 0; rank < 4; ++rank)
      write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, 4));
    ExportOptions options;
    options.source_layout = layout;
    const auto merge = [&] { return export_model(shards, shards + "-out", plan, *single_group(), options); };
    if (is_equal) {
      const ExportReport report = merge();
      REQUIRE(report.manifest.dropped.size() == 1);
      CHECK(report.manifest.dropped.front().reason == "it is tied to \"model.embed_tokens.weight\"");
      CHECK_FALSE(test::tensors_of(shards + "-out").contains("lm_head.weight"));
    } else {
      CHECK(has(words_of(ErrorKind::rank_mismatch, merge),
                "tensor \"lm_head.weight\" of rank 3 and \"model.embed_tokens.weight\" of rank 1 have different "
                "values, but the plan or \"tie_word_embeddings\" in config.json ties them"));
    }
  }
}

TEST_CASE("with a base whose config.json ties the head, the head is compared and left out") {
  const TemporaryDirectory temporary(test::Medium::memory);
  const std::string at = temporary.path().string();
  write_config(at + "/base");
  std::string config = test::read_text(at + "/base/config.json");
  test::write_text(at + "/base/config.json", config.replace(0, 1, R"({"tie_word_embeddings": true, )"));
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2");
  ExportOptions options;
  options.base_model = at + "/base";
  for (const std::string kind : {"equal", "other", "cast"}) {
    CAPTURE(kind);
    Model whole = model(false);
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"];
    if (kind == "other") whole["lm_head.weight"].values.back() += 1;
    // A model of one rank, and the files of four.
    std::filesystem::create_directory(at + "/" + kind);
    write_model(whole, at + "/" + kind + "/model.safetensors");
    ShardOptions sharding;
    sharding.base_model = at + "/base";
    shard_model(at + "/" + kind, at + "/" + kind + "-ranks", layout, "llama", sharding);
    if (kind == "cast") options.dtype = DType::bf16;
    for (const std::string& source : {kind, kind + "-ranks"}) {
      CAPTURE(source);
      const std::string out = at + "/" + source + "-out";
      const auto merge = [&] { return export_model(at + "/" + source, out, "", *single_group(), options); };
      if (kind == "other") {
        CHECK(has(words_of(ErrorKind::rank_mismatch, merge), "have different values, but the plan or \"tie_word_emb"));
        CHECK_FALSE(std::filesystem::exists(out));
        continue;
      }
      const ExportReport report = merge();
      REQUIRE(report.manifest.dropped.size() == 1);
      CHECK(report.manifest.dropped.front().reason == "config.json ties it to \"model.embed_tokens.weight\"");
      CHECK_FALSE(test::tensors_of(out).contains("lm_head.weight"));
      CHECK(test::tensors_of(out).size() == whole.size() - 1);
    }
  }
  Model larger = model(false);
  larger["lm_head.weight"] =
      pick(larger["model.embed_tokens.weight"], 40, 16, [](auto r, auto c) { return std::pair(r, c); });
  std::filesystem::create_directory(at + "/larger");
  write_model(larger, at + "/larger/model.safetensors");
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] { export_model(at + "/larger", at + "/no", "", *single_group(), options); }),
            "but \"lm_head.weight\" is BF16 [40, 16], and \"model.embed_tokens.weight\" is BF16 [37, 16]"));
  // Without a base or a dtype the model does not change.
  test::write_text(at + "/equal/config.json", test::read_text(at + "/base/config.json"));
  export_model(at + "/equal", at + "/same", "", *single_group());
  test::check_equal(at + "/equal", at + "/same");
}

TEST_CASE("a model is written with another file layout, and a base gives its config and tokenizer") {
  const TemporaryDirectory temporary;
  const std::string at = temporary.path().string();
  const Model whole = model(false);
  write_config(at + "/model");
  write_model(whole, at + "/model/model.safetensors");
  ExportOptions options;
  options.max_shard_size = 20'000;
  CHECK(export_model(at + "/model", at + "/parts", "", *single_group(), options).manifest.files == 2);
  test::check_equal(at + "/model", at + "/parts");

  std::filesystem::create_directory(at + "/base");
  const std::string base_config =
      R"({"model_type": "llama", "dtype": "float16", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
      "hidden_size": 16, "vocab_size": 37, "num_hidden_layers": 2, "quantization_config": {"quant_method": "x"}})";
  std::ofstream(at + "/base/config.json") << base_config;
  std::ofstream(at + "/base/tokenizer.json") << "{}";
  std::filesystem::create_directory(at + "/bare");
  write_model(vllm(whole, {}, false).front(), at + "/bare/" + shard_file_name(0, 1));
  options = {};
  options.base_model = at + "/base";
  options.dtype = DType::bf16;
  const ExportReport report = export_model(at + "/bare", at + "/out", "vllm", *single_group(), options);
  const auto config = read_model_config(at + "/out");
  REQUIRE(config);
  CHECK(config->at("dtype").as_string() == "bfloat16");
  CHECK_FALSE(config->contains("quantization_config"));
  CHECK(std::filesystem::exists(at + "/out/tokenizer.json"));
  CHECK(report.manifest.notes.size() == 2);

  const auto refused = [&](const std::string& text) {
    std::ofstream(at + "/base/config.json") << text;
    return words_of(ErrorKind::invalid_argument, [&] { plan_export(at + "/bare", "vllm", options); });
  };
  std::string other = base_config;
  CHECK(has(refused(other.replace(other.find("\"vocab_size\": 37"), 16, "\"vocab_size\": 99")), "true size"));
  other = base_config;
  CHECK(has(refused(other.replace(other.find("\"num_hidden_layers\": 2"), 22, "\"num_hidden_layers\": 3")),
            "no tensor belongs to layer 2"));
  Model headless = vllm(whole, {}, false).front();
  headless.erase("lm_head.weight");
  write_model(headless, at + "/bare/" + shard_file_name(0, 1));
  other = base_config;
  CHECK(has(refused(other.replace(0, 1, "{\"tie_word_embeddings\": false, ")), "lm_head.weight does not exist"));
}

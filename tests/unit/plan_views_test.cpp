// SPDX-License-Identifier: Apache-2.0
// Views of plans: the movement of elements against loops that know nothing of it, and the ranks' files of other
// programs as the formulas of their layouts give them, both ways.

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/load_shard.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/plan_views.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/merge/cast.hpp"
#include "src/merge/view.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/memory_source.hpp"
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
    take("q", heads / groups);
    take("k", 1);
    take("v", 1);
  }
  return below(parts);
}

/// As vLLM and TensorRT-LLM have them: of fewer heads than ranks each has one.
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
    const auto [t, p, e] = layout.place(rank);
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
    const auto [t, p, e] = layout.place(rank);
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
  // Row 2i + j of a head is HuggingFace's row i of half j.
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
};

// Meta's models have no biases.
void erase_biases(Model& model) {
  std::erase_if(model, [](const auto& item) { return item.first.ends_with(".bias"); });
}

/// Numbers of a view's elements in the whole, by a window of it.
std::vector<std::int64_t> numbers_of(const merge::Box& box, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> found(static_cast<std::size_t>(end - begin), -1);
  for (const merge::Box& part : merge::clipped(box, begin, end)) {
    std::vector<std::int64_t> index(part.axes.size(), 0);
    while (true) {
      std::int64_t from = part.from;
      std::int64_t to = part.to;
      for (std::size_t i = 0; i < index.size(); ++i) {
        from += index[i] * part.axes[i].from;
        to += index[i] * part.axes[i].to;
      }
      REQUIRE(to >= begin);
      REQUIRE(to < end);
      auto& place = found[static_cast<std::size_t>(to - begin)];
      REQUIRE(place == -1);
      place = from;
      std::size_t axis = index.size();
      while (axis > 0 && ++index[axis - 1] == part.axes[axis - 1].count) index[--axis] = 0;
      if (axis == 0) break;
    }
  }
  return found;
}

}  // namespace

TEST_CASE("a view has the elements that loops find, in every window, and there and back is where it was") {
  // [g = 2, (3 of 5), D = 4] of the rows, transposed, of one item of three.
  const Shape whole = {3, 40, 6};
  const merge::View view =
      merge::View(whole).item(1).slice(0, std::vector<std::int64_t>{2, 5, 4}, 1, 2, 3).transposed();
  REQUIRE(view.shape() == Shape{6, 24});
  std::vector<std::int64_t> wanted;
  for (std::int64_t c = 0; c < 6; ++c)
    for (std::int64_t g = 0; g < 2; ++g)
      for (std::int64_t h = 2; h < 5; ++h)
        for (std::int64_t d = 0; d < 4; ++d) wanted.push_back(240 + ((g * 5 + h) * 4 + d) * 6 + c);
  const merge::Box box = view.box();
  for (std::int64_t begin = 0; begin < 144; begin += 5)
    for (std::int64_t end = begin + 1; end <= 144; end += 7)
      REQUIRE(numbers_of(box, begin, end) == std::vector(wanted.begin() + begin, wanted.begin() + end));
  const merge::Box back = merge::reversed(box);
  const std::vector<std::int64_t> found = numbers_of(back, 0, 720);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    CHECK(found[static_cast<std::size_t>(wanted[i])] == static_cast<std::int64_t>(i));
  CHECK(std::ranges::count(found, -1) == 720 - 144);

  const merge::View halves =
      merge::View({8, 3}).reordered(0, std::vector<std::int64_t>{2, 2, 2}, std::vector<std::size_t>{0, 2, 1});
  CHECK(halves.shape() == Shape{8, 3});
  CHECK(numbers_of(halves.box(), 0, 24) == std::vector<std::int64_t>{0,  1,  2,  6,  7,  8,  3,  4,  5,  9,  10, 11,
                                                                     12, 13, 14, 18, 19, 20, 15, 16, 17, 21, 22, 23});
  CHECK(has(words_of(ErrorKind::argument,
                     [] {
                       (void)merge::View({9, 3}).slice(0, std::vector<std::int64_t>{2, 4}, 1, 0, 1);
                     }),
            "dimension 0 of the shape [9, 3] is no 2 x 4"));
}

TEST_CASE("a large transpose is read in windows as in one") {
  test::MemorySource source;
  constexpr std::int64_t rows = 700;
  constexpr std::int64_t columns = 1100;
  std::vector<std::byte> bytes(rows * columns * 2);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const auto value = static_cast<std::uint16_t>(i * 7919);
    std::memcpy(bytes.data() + i * 2, &value, 2);
  }
  source.add("w", DType::bf16, {rows, columns}, bytes);
  const ViewedTensors viewed(
      source,
      {{"t", {DType::bf16, {columns, rows}}, DType::bf16, false, {merge::View({rows, columns}).transposed().box()}}});
  std::vector<std::byte> all(bytes.size());
  viewed.read(0, 0, all);
  for (std::int64_t c = 0; c < columns; ++c)
    for (std::int64_t r = 0; r < rows; ++r)
      REQUIRE(std::memcmp(all.data() + (c * rows + r) * 2, bytes.data() + (r * columns + c) * 2, 2) == 0);
  for (const std::uint64_t step : {2UL, 1398UL, 100'000UL}) {
    std::vector<std::byte> part(step);
    for (const std::uint64_t at : {0UL, 2UL, 700'002UL, bytes.size() - step}) {
      viewed.read(0, at, part);
      REQUIRE(std::memcmp(part.data(), all.data() + at, step) == 0);
    }
  }
}

TEST_CASE("casts round to the nearest, ties to even, and tell of what becomes infinite") {
  const auto cast_one = [](auto value, DType from, DType to) {
    std::uint32_t out = 0;
    const auto infinite = merge::cast(from, std::as_bytes(std::span(&value, 1)), to,
                                      std::as_writable_bytes(std::span(&out, 1)).first(itemsize(to)));
    return std::pair(out, infinite.has_value());
  };
  const auto from_bits = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  CHECK(cast_one(from_bits(0x3f808000), DType::f32, DType::bf16) == std::pair(0x3f80U, false));
  CHECK(cast_one(from_bits(0x3f818000), DType::f32, DType::bf16) == std::pair(0x3f82U, false));
  CHECK(cast_one(from_bits(0x3f808001), DType::f32, DType::bf16) == std::pair(0x3f81U, false));
  CHECK(cast_one(from_bits(0x00000001), DType::f32, DType::bf16) == std::pair(0x0000U, false));
  CHECK(cast_one(from_bits(0x00018000), DType::f32, DType::bf16) == std::pair(0x0002U, false));
  CHECK(cast_one(from_bits(0x7fa00000), DType::f32, DType::bf16) == std::pair(0x7fc0U, false));
  CHECK(cast_one(from_bits(0xff800000), DType::f32, DType::bf16) == std::pair(0xff80U, false));
  CHECK(cast_one(from_bits(0x7f7fffff), DType::f32, DType::bf16) == std::pair(0x7f80U, true));
  CHECK(cast_one(65519.0F, DType::f32, DType::f16) == std::pair(0x7bffU, false));
  CHECK(cast_one(65520.0F, DType::f32, DType::f16) == std::pair(0x7c00U, true));
  CHECK(cast_one(std::uint16_t{0x0001}, DType::f16, DType::f32) == std::pair(0x33800000U, false));
  CHECK(cast_one(1e39, DType::f64, DType::f32) == std::pair(0x7f800000U, true));
  // Once as a float it would be a tie.
  CHECK(cast_one(1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40), DType::f64, DType::bf16) ==
        std::pair(0x3f81U, false));
  CHECK(cast_one(1.0 + std::ldexp(1.0, -8) - std::ldexp(1.0, -40), DType::f64, DType::bf16) ==
        std::pair(0x3f80U, false));
  CHECK_FALSE(merge::can_cast(DType::f8_e4m3fn, DType::f32));
  CHECK_FALSE(merge::can_cast(DType::f32, DType::f8_e4m3fn));
}

TEST_CASE("ranks of other programs become HuggingFace's model, and it becomes theirs") {
  const std::vector<Sample> samples = {
      {"megatron", "1", megatron},
      {"megatron", "2", megatron},
      {"megatron", "tp=4,pp=2", megatron},
      {"megatron", "tp=2,pp=2,ep=2", megatron, true},
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
    write_model(whole, given + "/model.safetensors");
    const ParallelLayout layout = ParallelLayout::parse(sample.layout);
    const Files files = sample.files(whole, layout, sample.of_experts);
    for (int rank = 0; rank < layout.ranks(); ++rank)
      write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, layout.ranks()));

    ExportOptions options;
    options.layout = layout;
    export_model(shards, temporary.path().string() + "/out", sample.plan, *single_group(), options);
    test::check_equal(given, temporary.path().string() + "/out");

    shard_model(given, temporary.path().string() + "/cut", sample.plan, layout);
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
        // The way back gives the name of dense models.
        const bool other_norm = sample.of_experts && tensor.find("pre_mlp_layernorm") != std::string::npos;
        if (other_norm && !places.contains(tensor)) continue;
        REQUIRE(places.contains(tensor));
        CHECK(bitwise_equal(wanted.tensor(i), cut.tensor(places.at(tensor))));
      }
      for (const auto& [tensor, loaded] : load_shard(given, sample.plan, layout, rank))
        CHECK(bitwise_equal(loaded, cut.tensor(places.at(tensor))));
    }
    // Cut and joined again, by the plan that the shards remember.
    export_model(temporary.path().string() + "/cut", temporary.path().string() + "/again", "", *single_group());
    test::check_equal(given, temporary.path().string() + "/again");
  }
}

TEST_CASE("views that contradict themselves, the model or the ranks are one clear error") {
  const Config config = parse_json(config_text);
  const auto error = [&](const std::string& view, const Shape& shape, int ranks = 1, DType dtype = DType::f32) {
    return words_of(ErrorKind::argument, [&] {
      const MergePlan plan = MergePlan::parse(
          R"({"muster_plan": 1, "views": [)" + view + R"(], "rules": [{"match": "*", "action": "same"}]})", "p",
          &config);
      view_rank(plan, {.tensor = ranks}, {{{"a.weight", {dtype, shape}}, {"b", {DType::f32, {3}}}}, {}});
    });
  };
  const std::string groups = R"({"match": "a.*", "split": {"groups": ["num_attention_heads", "num_key_value_heads",
      "num_key_value_heads"]}, "to": ["q.$1", "k.$1", "v.$1"]})";
  CHECK(has(error(groups, {60, 2}),
            "plan \"p\": view 1: tensor \"a.weight\": its size 60 along dimension 0 is no "
            "multiple of 4 parts of [2, 1, 1]"));
  CHECK(has(error(groups, {64, 2}, 8), "8 ranks do not divide the 4 groups"));
  CHECK(has(error(R"({"match": "a.*", "split": {"blocks": [1, 2], "dim": 2}, "to": ["x", "y"]})", {6, 2}),
            "the shape [6, 2] has no dimension 2"));
  CHECK(has(error(R"({"match": "a.*", "split": {"blocks": ["no_such", 2]}, "to": ["x", "y"]})", {6, 2}),
            "needs \"no_such\" of config.json, which does not have it"));
  CHECK(has(error(R"({"match": "*", "transpose": true})", {6, 2}), "tensor \"b\": the shape [3] has no dimension -2"));
  CHECK(has(error(R"({"match": "a.*", "permute_rope": "num_attention_heads"})", {24, 2}), "no 8 heads of two halves"));
  CHECK(has(error(R"({"match": "a.*", "to": "b"})", {6, 2}), "it becomes \"b\", and so does \"a.weight\""));
  CHECK(has(error(R"({"match": "a.*", "cast": "BF16"})", {6, 2}, 1, DType::f8_e4m3fn), "F8_E4M3 is quantised"));
  CHECK(has(error(R"({"match": "a.*", "transpose": true})", {6, 2}, 1, DType::f4_e2m1), "share a byte"));

  const auto refused = [](const std::string& view) {
    return words_of(ErrorKind::corrupt, [&] {
      MergePlan::parse(R"({"muster_plan": 1, "views": [)" + view + R"(], "rules": [{"match": "*", "action": "same"}]})",
                       "p");
    });
  };
  CHECK(
      has(refused(R"({"match": "a", "split": {"blocks": [1, 1]}, "to": "x"})"), "view 1 (line 1): \"to\" has 1 names"));
  CHECK(has(refused(R"({"match": "a", "split": {"dim": 1}, "to": ["x", "y"]})"), "neither \"blocks\" nor"));
  CHECK(has(refused(R"({"match": "a", "split": {"blocks": [1, 1], "heads": [1, 1]}, "to": ["x", "y"]})"), "alone"));
  CHECK(has(refused(R"({"match": "a", "unstack": true, "to": "x"})"), "needs one \"#\""));
  CHECK(has(refused(R"({"match": "a", "drop": "why", "to": "x"})"), "\"drop\" and \"to\" contradict each other"));
  CHECK(has(refused(R"({"match": "a", "cast": "F8_E4M3"})"), "not one of F32, F16, BF16"));
  CHECK(has(refused(R"({"match": "a", "turn": 1})"), "unknown key \"turn\""));
}

TEST_CASE("turned around, a view that loses something, or lacks a part, is one clear error") {
  const Config config = parse_json(config_text);
  const auto error = [&](const std::string& view, const std::vector<NamedSpec>& tensors) {
    return words_of(ErrorKind::argument, [&] {
      const MergePlan plan = MergePlan::parse(
          R"({"muster_plan": 1, "views": [)" + view + R"(], "rules": [{"match": "*", "action": "same"}]})", "p",
          &config);
      unview_rank(plan, {}, tensors);
    });
  };
  const std::string halves = R"({"match": "*.w", "split": {"blocks": [1, 1]}, "to": ["$1.a", "$1.b"]})";
  const TensorSpec spec{DType::f32, {4, 2}};
  CHECK(has(error(halves, {{"x.a", spec}}), "tensor \"x.w\": a part of it is not there (\"$1.b\")"));
  CHECK(has(error(halves, {{"x.a", spec}, {"x.b", {DType::f32, {6, 2}}}}),
            "its part \"x.a\" is [4, 2], and would be [5, 2]"));
  CHECK(has(error(halves, {{"x.a", spec}, {"x.b", {DType::f16, {4, 2}}}}), "have different dtypes"));
  CHECK(has(error(halves, {{"x.a", {DType::f32, {1}}}, {"x.b", {DType::f32, {1}}}}), "a scale of one element each"));
  CHECK(has(error(halves, {{"x.w", spec}}), "it has no way back"));
  CHECK(has(error(R"({"match": "*.w", "cast": "BF16"})", {{"x.w", spec}}), "has no way back"));
  CHECK(has(error(R"({"match": "s.*", "unstack": true, "to": "l.#.$1"})", {{"l.0.w", spec}, {"l.2.w", spec}}),
            "item 1 of it is not there, and item 2 is"));
}

TEST_CASE("stacked layers come apart and together, under a prefix, and what is not under it is left out") {
  const MergePlan plan = MergePlan::parse(
      R"({"muster_plan": 1, "at": "model.", "views": [{"match": "s.*", "unstack": true, "transpose": true,
          "to": "layers.#.$1"}], "rules": [{"match": "*", "action": "same"}]})",
      "p");
  const ViewedRank viewed = view_rank(
      plan, {},
      {{{"model.s.w", {DType::f32, {3, 4, 2}}}, {"model.n", {DType::f32, {5}}}, {"optimizer.x", {DType::f32, {5}}}},
       {}});
  REQUIRE(viewed.tensors.tensors.size() == 4);
  CHECK(viewed.tensors.tensors[1].name == "layers.1.w");
  CHECK(viewed.tensors.tensors[1].spec.shape == Shape{2, 4});
  CHECK(viewed.views[1].boxes.front().from == 8);
  REQUIRE(viewed.left_out.size() == 1);
  CHECK(viewed.left_out.front().reason == "its name does not begin with \"model.\"");
  const std::vector<ViewedTensor> back = unview_rank(plan, {}, viewed.tensors.tensors);
  REQUIRE(back.size() == 2);
  CHECK(back[0].name == "model.s.w");
  CHECK(back[0].spec.shape == Shape{3, 4, 2});
  CHECK(back[1].name == "model.n");
}

TEST_CASE("an export casts and selects, and a number that would become infinite ends it with nothing left") {
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
  CHECK(report.account.dropped.size() == 1);
  CHECK(report.account.dropped.front().reason == "it was not selected");
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
      has(words_of(ErrorKind::argument,
                   [&] { export_model(shards, temporary.path().string() + "/no", "vllm", *single_group(), options); }),
          "is finite and would become infinite"));
  CHECK_FALSE(std::filesystem::exists(temporary.path().string() + "/no"));
  options.select = "no such*";
  CHECK(
      has(words_of(ErrorKind::argument, [&] { plan_export(shards, "vllm", options); }), "no tensor is left of select"));
}

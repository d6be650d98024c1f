// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/demo_model.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/core/thread_pool.hpp"

namespace muster::inspect {
namespace {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  // splitmix64: a counter and a hash, so a value depends only on the seed and the position.
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  // The sum of four uniform 16-bit numbers is nearly normal; deviation 0.02.
  float normal() {
    const std::uint64_t r = next();
    const auto sum = static_cast<std::int64_t>((r & 0xffff) + ((r >> 16) & 0xffff) + ((r >> 32) & 0xffff) + (r >> 48));
    return static_cast<float>(sum - 2 * 0xffff) * (0.02F / 37837.0F);
  }

 private:
  std::uint64_t state_;
};

std::uint64_t seed_of(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

std::uint16_t to_bf16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

template <class T, class Make>
void fill(std::span<std::byte> target, Make&& make) {
  for (std::size_t at = 0; at + sizeof(T) <= target.size(); at += sizeof(T)) {
    const T value = make();
    std::memcpy(target.data() + at, &value, sizeof(T));
  }
}

}  // namespace

DemoModel llama_model(const LlamaSizes& sizes) {
  const std::int64_t head = sizes.hidden / sizes.heads;
  const std::int64_t key_value = head * sizes.key_value_heads;
  DemoModel model;
  const auto add = [&](std::string name, Shape shape) {
    model.tensors.push_back({std::move(name), DType::bf16, std::move(shape)});
  };
  add("model.embed_tokens.weight", {sizes.vocabulary, sizes.hidden});
  for (std::int64_t layer = 0; layer < sizes.layers; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer);
    add(at + "input_layernorm.weight", {sizes.hidden});
    add(at + "self_attn.q_proj.weight", {sizes.hidden, sizes.hidden});
    add(at + "self_attn.k_proj.weight", {key_value, sizes.hidden});
    add(at + "self_attn.v_proj.weight", {key_value, sizes.hidden});
    if (sizes.biases) {
      add(at + "self_attn.q_proj.bias", {sizes.hidden});
      add(at + "self_attn.k_proj.bias", {key_value});
      add(at + "self_attn.v_proj.bias", {key_value});
    }
    add(at + "self_attn.o_proj.weight", {sizes.hidden, sizes.hidden});
    add(at + "post_attention_layernorm.weight", {sizes.hidden});
    add(at + "mlp.gate_proj.weight", {sizes.intermediate, sizes.hidden});
    add(at + "mlp.up_proj.weight", {sizes.intermediate, sizes.hidden});
    add(at + "mlp.down_proj.weight", {sizes.hidden, sizes.intermediate});
  }
  add("model.norm.weight", {sizes.hidden});
  if (!sizes.tied_head) add("lm_head.weight", {sizes.vocabulary, sizes.hidden});
  model.config = fmt::format(R"({{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "attention_bias": {},
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": {},
  "initializer_range": 0.02,
  "intermediate_size": {},
  "max_position_embeddings": 2048,
  "num_attention_heads": {},
  "num_hidden_layers": {},
  "num_key_value_heads": {},
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "tie_word_embeddings": {},
  "torch_dtype": "bfloat16",
  "vocab_size": {}
}}
)",
                             sizes.biases, sizes.hidden, sizes.intermediate, sizes.heads, sizes.layers,
                             sizes.key_value_heads, sizes.tied_head, sizes.vocabulary);
  return model;
}

LlamaSizes llama_sizes(std::uint64_t megabytes) {
  LlamaSizes sizes;
  if (megabytes >= 2000) {
    sizes = {.hidden = 2048, .intermediate = 5632, .layers = 1, .heads = 32, .key_value_heads = 8};
  } else if (megabytes < 20) {
    sizes = {.hidden = 96, .intermediate = 256, .layers = 1, .heads = 12, .key_value_heads = 4, .vocabulary = 1000};
  } else if (megabytes < 120) {
    sizes = {.hidden = 384, .intermediate = 1024, .layers = 1, .heads = 12, .key_value_heads = 4, .vocabulary = 8000};
  }
  const auto weights = static_cast<std::int64_t>(megabytes) * 500'000;
  const std::int64_t heads = 2 * sizes.vocabulary * sizes.hidden;
  const std::int64_t key_value = sizes.hidden / sizes.heads * sizes.key_value_heads;
  const std::int64_t layer = sizes.hidden * (2 * sizes.hidden + 2 * key_value + 3 * sizes.intermediate);
  sizes.layers = std::max<std::int64_t>(1, (weights - heads + layer / 2) / layer);
  return sizes;
}

void fill_demo_tensor(const TensorEntry& part, std::span<std::byte> target) {
  Random random(seed_of(part.name));
  // Norms scale by about one: with values near zero, a lost norm would not be noticed.
  const float base = part.name.ends_with("norm.weight") || part.name.ends_with("LayerNorm.weight") ? 1.0F : 0.0F;
  switch (part.dtype) {
    case DType::bf16:
      fill<std::uint16_t>(target, [&] { return to_bf16(base + random.normal()); });
      break;
    case DType::f32:
      fill<float>(target, [&] { return base + random.normal(); });
      break;
    case DType::i64:
      fill<std::int64_t>(target, [count = std::int64_t{0}]() mutable { return count++; });
      break;
    default:
      throw Error(ErrorKind::unsupported,
                  fmt::format("demo model: {} is not supported. Use BF16, F32 or I64", to_string(part.dtype)));
  }
}

std::uint64_t write_demo_model(const DemoModel& model, const std::string& directory, std::uint64_t max_shard_size) {
  OutputDirectory output(directory);
  std::uint64_t bytes = 0;
  for (const TensorEntry& part : model.tensors) bytes += byte_size(part.dtype, part.shape);
  const FileLayout layout = split_into_files(model.tensors, max_shard_size);
  for (const CheckpointFile& file : layout.files) {
    std::vector<TensorEntry> in_file;
    for (const std::size_t index : file.tensors) in_file.push_back(model.tensors[index]);
    SafetensorsWriter writer(output.partial() + "/" + file.name, std::move(in_file), {{"format", "pt"}});
    parallel_for(file.tensors.size(), copy_workers(), [&](std::size_t i, std::size_t) {
      const TensorEntry& part = model.tensors[file.tensors[i]];
      Tensor tensor = Tensor::allocate(part.dtype, part.shape);
      fill_demo_tensor(part, {tensor.mutable_data(), tensor.nbytes()});
      writer.write(part.name, 0, tensor.bytes());
    });
    writer.commit();
  }
  if (!layout.index.empty()) write_file(output.partial() + "/model.safetensors.index.json", layout.index);
  write_file(output.partial() + "/config.json", model.config);
  output.commit();
  return bytes;
}

}  // namespace muster::inspect

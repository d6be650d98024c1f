// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model to try things on: Llama's tensors by HuggingFace's names, made-up values, the same every time.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"

namespace muster::inspect {

/// What such a model is made of.
struct DemoModel {
  std::string config;  ///< config.json
  std::vector<TensorEntry> tensors;
};

struct LlamaSizes {
  std::int64_t hidden = 768;
  std::int64_t intermediate = 2048;
  std::int64_t layers = 8;
  std::int64_t heads = 12;
  std::int64_t key_value_heads = 4;
  std::int64_t vocabulary = 32000;
  bool biases = false;     ///< q, k, v have biases, as in Qwen2
  bool tied_head = false;  ///< no lm_head
};
DemoModel llama_model(const LlamaSizes& sizes);
/// Sizes for a bf16 model of about so many megabytes.
LlamaSizes llama_sizes(std::uint64_t megabytes);

/// Values of one tensor: floats near a normal distribution of deviation 0.02, integers counting up. A function of the
/// name and the size only.
void fill_demo_tensor(const TensorEntry& part, std::span<std::byte> target);

/// Writes the model in HuggingFace's layout; `directory` must not exist. Returns the bytes of its tensors.
std::uint64_t write_demo_model(const DemoModel& model, const std::string& directory, std::uint64_t max_shard_size);

}  // namespace muster::inspect

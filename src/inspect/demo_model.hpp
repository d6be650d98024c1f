// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model for trials: Llama's tensors under Hugging Face's names, with synthetic values that are the same every time.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"

namespace muster::inspect {

/// The parts of such a model.
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
/// Returns sizes for a bf16 model of about this many megabytes.
LlamaSizes llama_sizes(std::uint64_t megabytes);

/// Fills one tensor: floats near a normal distribution of deviation 0.02, integers counting up. The values depend only
/// on the name and the size.
void fill_demo_tensor(const TensorEntry& part, std::span<std::byte> target);

/// Writes the model in Hugging Face's layout; `directory` must not exist. Returns the bytes of its tensors.
std::uint64_t write_demo_model(const DemoModel& model, const std::string& directory, std::uint64_t max_shard_size);

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small model, and the rank files that other programs make of it, built from the formulas of their layouts.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "muster/parallel_layout.hpp"
#include "muster/tensor.hpp"

namespace muster::test::samples {

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

constexpr std::int64_t heads = 8;
constexpr std::int64_t groups = 4;
constexpr std::int64_t head = 4;
constexpr std::int64_t hidden = 16;
constexpr std::int64_t inner = 24;
constexpr std::int64_t vocabulary = 37;
constexpr int layers = 2;
constexpr int experts = 4;

/// Returns a matrix whose element (r, c) is that of `from` at where(r, c), or 0 outside of it.
Matrix pick(const Matrix& from, std::int64_t rows, std::int64_t columns,
            const std::function<std::pair<std::int64_t, std::int64_t>(std::int64_t, std::int64_t)>& where);
Matrix rows_of_rank(const Matrix& m, int rank, int ranks);
Matrix columns_of_rank(const Matrix& m, int rank, int ranks);
/// Returns a matrix with consecutive values, which differ for each `salt`.
Matrix filled(std::int64_t rows, std::int64_t columns, int salt, bool is_vector = false);

/// Returns the model with the names of Hugging Face's Llama, or of a Llama with experts.
Model model(bool of_experts);
// Variants of it: with the names of Mixtral; with gated attention and shared experts; with compressed query, key and
// value.
Model mixtral(Model model);
Model gated(Model model);
Model latent(Model model);
/// Removes the biases, which Meta's models do not have.
void erase_biases(Model& model);

Tensor tensor_of(const Matrix& m);
void write_model(const Model& model, const std::string& file);
/// Creates the directory with the config.json of the model.
void write_config(const std::string& directory);

/// Returns "model.layers.N.".
std::string layer_of(int layer);
/// Returns the part of Megatron's fused matrix that a rank has.
Matrix query_key_value_by_groups(const Model& model, const std::string& at, const std::string& kind, int rank,
                                 int ranks);

/// The tensors of each rank. All programs have the same parameters.
using Files = std::vector<Model>;
Files megatron(const Model& model, const ParallelLayout& layout, bool of_experts);
/// If the number of ranks is a multiple of the number of groups, each rank has a slice of the fused matrices, wherever
/// that cuts them.
Files megatron_of_parts(const Model& model, const ParallelLayout& layout, bool of_experts);
Files megatron_mixtral(const Model& model, const ParallelLayout& layout, bool of_experts);
Files megatron_latent(const Model& model, const ParallelLayout& layout, bool of_experts);
Files vllm(const Model& model, const ParallelLayout& layout, bool of_experts);
Files trtllm(const Model& model, const ParallelLayout& layout, bool of_experts);
Files meta(const Model& model, const ParallelLayout& layout, bool of_experts);

}  // namespace muster::test::samples

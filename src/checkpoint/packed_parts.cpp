// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/packed_parts.hpp"

#include <algorithm>
#include <array>

namespace muster {
namespace {

/// Returns true for scales in modules without a packed weight: those of the key-value cache and of simulated
/// quantisation.
bool is_scale_by_name(std::string_view leaf) {
  constexpr std::array<std::string_view, 7> leaves = {"_amax",    "k_scale",    "v_scale",          "q_scale",
                                                      "kv_scale", "prob_scale", "prob_output_scale"};
  return std::ranges::find(leaves, leaf) != leaves.end();
}

std::string_view leaf_of(std::string_view name) {
  return name.substr(name.rfind('.') + 1);  // npos + 1 is 0
}

/// Returns true for quantised dtypes, and for matrices and weights of 8 to 32 bit integers. Other integer tensors are
/// not packed: positions and counters have 64 bits, and masks have names of biases.
bool has_packed_elements(const NamedSpec& tensor) {
  const DType dtype = tensor.spec.dtype;
  if (is_quantised_dtype(dtype)) return true;
  const bool is_integer = dtype == DType::i8 || dtype == DType::u8 || dtype == DType::i16 || dtype == DType::i32;
  const std::string_view leaf = leaf_of(tensor.name);
  return is_integer && !leaf.ends_with("bias") && !leaf.ends_with("_ids") &&
         (tensor.spec.shape.size() >= 2 || leaf.find("weight") != std::string_view::npos);
}

}  // namespace

bool is_quantised_dtype(DType dtype) {
  const std::string_view name = to_string(dtype);
  return name.starts_with("F8") || name.starts_with("F4") || name.starts_with("F6") || is_packed(dtype);
}

std::string_view module_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

PackedParts::PackedParts(std::span<const NamedSpec> model) {
  for (const NamedSpec& tensor : model)
    if (has_packed_elements(tensor)) modules_.emplace(module_of(tensor.name));
}

bool PackedParts::is_in_packed_module(std::string_view name) const {
  const std::string_view module = module_of(name);
  return modules_.contains(module) || (!module.empty() && modules_.contains(module_of(module)));
}

bool PackedParts::has(const NamedSpec& tensor) const {
  if (has_packed_elements(tensor)) return true;
  const std::string_view leaf = leaf_of(tensor.name);
  if (is_scale_by_name(leaf) || !weights_of_scale(tensor.name).empty()) return true;
  return leaf != "bias" && !leaf.ends_with("_bias") && is_in_packed_module(tensor.name);
}

}  // namespace muster

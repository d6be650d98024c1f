// SPDX-License-Identifier: Apache-2.0
// Determines numbers that config.json omits. Config classes of transformers write a nested config without the values
// that equal their defaults; the published configs of Gemma 3 and LLaVA are examples.

#include <array>
#include <unordered_map>

#include "muster/state.hpp"
#include "src/checkpoint/arrangement.hpp"

namespace muster {
namespace {

constexpr std::array<std::string_view, 4> text_places = {"text_config", "llm_config", "language_config",
                                                         "thinker_config.text_config"};

const Config* find_below_text(const Config& config, std::string_view name) {
  for (const std::string_view place : text_places)
    if (const Config* text = find_place(config, place))
      if (const Config* found = find_place(*text, name)) return found;
  return nullptr;
}

/// Returns the defaults of the config class of the text model, or null if the model type is unknown.
const Config* defaults_of(const Config& config) {
  const Config* type = find_below_text(config, "model_type");
  if (type == nullptr) type = find_place(config, "model_type");
  if (type == nullptr || !type->is_string()) return nullptr;
  const Config* sizes = default_sizes().as_object().find(type->as_string());
  // For a model with towers, the table has the type of its text model.
  if (sizes != nullptr && sizes->is_string()) sizes = default_sizes().as_object().find(sizes->as_string());
  return sizes != nullptr && sizes->is_object() ? sizes : nullptr;
}

/// The shapes of the text model's first attention layer. Vision towers also have attention, but no token embeddings.
class Attention {
 public:
  explicit Attention(std::span<const NamedSpec> tensors) {
    constexpr std::string_view embedding = "embed_tokens.weight";
    constexpr std::string_view output = "self_attn.o_proj.weight";
    std::unordered_map<std::string_view, const TensorSpec*> by_name;
    std::string text = "\n";
    for (const NamedSpec& tensor : tensors) {
      by_name.emplace(tensor.name, &tensor.spec);
      if (tensor.name.ends_with(embedding) && text == "\n")
        text = tensor.name.substr(0, tensor.name.size() - embedding.size()) + "layers.";
    }
    for (const NamedSpec& tensor : tensors) {
      if (!tensor.name.starts_with(text) || !tensor.name.ends_with(output)) continue;
      const std::string module = tensor.name.substr(0, tensor.name.size() - output.size()) + "self_attn.";
      const auto shape = [&](std::string_view name) {
        const auto found = by_name.find(module + std::string(name));
        return found == by_name.end() || is_packed(found->second->dtype) ? Shape() : found->second->shape;
      };
      const Shape keys = shape("k_proj.weight");
      if (tensor.spec.shape.size() != 2 || is_packed(tensor.spec.dtype) ||
          to_string(tensor.spec.dtype).find('F') == std::string_view::npos)
        continue;
      columns = tensor.spec.shape[1];
      key_rows = keys.size() == 2 ? keys[0] : 0;
      const Shape query_norm = shape("q_norm.weight");
      const Shape key_norm = shape("k_norm.weight");
      if (!query_norm.empty() && !key_norm.empty() && query_norm.back() == key_norm.back())
        norm_size = query_norm.back();
      return;
    }
  }
  std::int64_t columns = 0;    ///< columns of the output projection: all heads of a rank
  std::int64_t key_rows = 0;   ///< rows of the key projection
  std::int64_t norm_size = 0;  ///< length of the norms of queries and keys, if both are equal; 0: no such norm
};

}  // namespace

const Config& default_sizes() {
  static const Config sizes = parse_json(builtin_defaults());
  return sizes;
}

const Config* find_here_or_in_text(const Config& config, std::string_view name) {
  const Config* found = find_place(config, name);
  if (found != nullptr && !found->is_null()) return found;
  const Config* inner = find_below_text(config, name);
  return inner == nullptr ? found : inner;
}

Config with_sizes(const Config& config, std::span<const NamedSpec> tensors, std::int64_t ranks) {
  if (!config.is_object()) return config;
  Config whole = config;
  const auto number = [&](std::string_view key) { return model_number(whole, key); };
  const auto is_absent = [&](std::string_view key) {
    const Config* found = find_here_or_in_text(whole, key);
    return found == nullptr || found->is_null();
  };
  const Config* defaults = defaults_of(config);
  const auto take_default = [&](std::string_view key) {
    const Config* value = defaults == nullptr ? nullptr : defaults->as_object().find(key);
    if (value != nullptr && is_absent(key)) whole[std::string(key)] = *value;
  };

  const Attention attention(tensors);
  const std::int64_t columns = attention.columns * ranks;
  const auto heads = number("num_attention_heads");
  const bool fits = attention.norm_size > 0 && columns % attention.norm_size == 0 &&
                    (attention.columns > attention.norm_size || (heads && *heads * attention.norm_size == columns));
  // The norm applies to each head. A norm over all heads has one element per row of the projection.
  if (fits && is_absent("head_dim")) whole["head_dim"] = attention.norm_size;
  const auto size = number("head_dim");
  if (!heads && ranks == 1 && size && columns > 0 && columns % *size == 0)
    whole["num_attention_heads"] = columns / *size;
  // If the shapes contradict the defaults, these belong to another model.
  const auto usual = defaults == nullptr ? std::nullopt : model_number(*defaults, "num_attention_heads");
  const bool is_usual = !number("num_attention_heads") && (!usual || columns % *usual == 0);
  if (is_usual && columns == 0) take_default("head_dim");
  if (defaults != nullptr)
    for (const auto& [key, value] : defaults->as_object())
      if (key != "head_dim" && key != "num_key_value_heads" && (is_usual || key.starts_with("linear_")))
        take_default(key);

  const auto queries = number("num_attention_heads");
  if (!queries || !is_absent("num_key_value_heads") || find_in_config(config, "kv_lora_rank") != nullptr) return whole;
  if (ranks == 1 && columns > 0 && columns % *queries == 0) {
    const std::int64_t head = columns / *queries;
    const std::int64_t keys = attention.key_rows / head;
    if (keys > 0 && attention.key_rows % head == 0 && *queries % keys == 0) whole["num_key_value_heads"] = keys;
  } else if (defaults != nullptr) {
    // A default that does not divide the number of heads belongs to another model.
    const auto keys = model_number(*defaults, "num_key_value_heads");
    if (keys && *queries % *keys == 0) take_default("num_key_value_heads");
  }
  return whole;
}

void fit_to(MergePlan& plan, std::span<const NamedSpec> tensors, std::int64_t ranks) {
  plan.set_model_config(with_sizes(plan.given_config(), tensors, ranks));
}

}  // namespace muster

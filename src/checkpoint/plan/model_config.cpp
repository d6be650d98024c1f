// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/plan/model_config.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <unordered_map>
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"

namespace muster {
namespace {

// Names in DistilBERT, GPT-2, BLOOM, MPT and T5. In all models of transformers, a config without key-value heads has as
// many of them as heads.
constexpr std::array<std::pair<std::string_view, std::string_view>, 17> other_names = {
    {{"num_attention_heads", "n_heads"},
     {"num_attention_heads", "n_head"},
     {"num_attention_heads", "num_heads"},
     {"num_key_value_heads", "num_kv_heads"},
     {"num_key_value_heads", "num_attention_heads"},
     {"num_key_value_heads", "n_heads"},
     {"num_kv_heads", "num_attention_heads"},
     {"num_hidden_layers", "n_layers"},
     {"num_hidden_layers", "n_layer"},
     {"num_hidden_layers", "num_layers"},
     {"hidden_size", "dim"},
     {"hidden_size", "n_embd"},
     {"hidden_size", "n_embed"},
     {"hidden_size", "d_model"},
     {"head_dim", "d_kv"},
     {"intermediate_size", "hidden_dim"},
     {"intermediate_size", "n_inner"}}};

constexpr std::string_view embedding = "embed_tokens.weight";
// For plans that do not specify the position of a layer's number. Not for ALBERT, whose layers share one set of
// weights.
constexpr std::string_view usual_layers = "{,*.}{layers,h,encoder.layer}.#.*";

std::optional<std::int64_t> number_of(const Config* found) {
  if (found == nullptr || found->type() != Config::Type::integer || found->as_int() < 1 ||
      found->as_int() > std::int64_t{1} << 31)
    return std::nullopt;
  return found->as_int();
}

/// The expected size of one dimension of a tensor: the product of some numbers of config.json.
struct Size {
  std::string words;  ///< "num_key_value_heads" 2 x "head_dim" 8
  std::int64_t value = 0;
};

class ConfigCheck {
 public:
  ConfigCheck(const MergePlan& plan, std::span<const NamedSpec> model) : config_(plan.model_config()), model_(model) {
    const Numbering layers =
        plan.layers() ? *plan.layers() : Numbering{NumberPattern::parse(std::string(usual_layers))};
    for (const NamedSpec& tensor : model) {
      by_name_.emplace(tensor.name, &tensor.spec);
      if (tensor.name.ends_with(embedding))
        text_layers_.push_back(tensor.name.substr(0, tensor.name.size() - embedding.size()) + "layers.");
      // Adapters may exist for some layers only.
      if (const auto number = layers.find(tensor.name); number && tensor.name.find(".lora_") == std::string::npos)
        layers_.insert(*number);
    }
  }

  void operator()() {
    check_layers();
    for (const NamedSpec& tensor : model_)
      if (is_plain(tensor.spec)) check(tensor);
    // In some models a few layers have other sizes; a wrong merge or cut affects all layers alike.
    for (const auto& [kind, fits] : fits_)
      if (!fits.any) refuse(fits.misfit);
  }

 private:
  // Elements of packed and other integer types contain several weights each.
  static bool is_plain(const TensorSpec& spec) {
    return spec.shape.size() == 2 && !is_packed(spec.dtype) &&
           to_string(spec.dtype).find('F') != std::string_view::npos;
  }

  void check_layers() const {
    const auto count = model_number(config_, "num_hidden_layers");
    if (!count || layers_.empty()) return;
    for (std::int64_t layer = 0; layer < *count; ++layer)
      if (!layers_.contains(layer))
        refuse(fmt::format("no tensor belongs to layer {}, but \"num_hidden_layers\" is {}", layer, *count));
  }

  void check(const NamedSpec& tensor) {
    const auto is = [&](std::string_view end) { return tensor.name.ends_with(end); };
    const auto hidden = number("hidden_size");
    if (is("embed_tokens.weight") || is("embed_in.weight") || is("word_embeddings.weight") || is("lm_head.weight") ||
        is("embed_out.weight")) {
      const auto vocabulary = number("vocab_size");
      // A draft model's head has only the tokens that it may propose.
      const bool is_draft = is("lm_head.weight") && find_in_config(config_, "draft_vocab_size") != nullptr;
      if (vocabulary && !is_draft && tensor.spec.shape[0] < vocabulary->value) refuse(misfit(tensor, 0, *vocabulary));
      // Some models project smaller embeddings to the hidden size.
      const bool is_projected = find_in_config(config_, "word_embed_proj_dim") != nullptr ||
                                find_in_config(config_, "embedding_size") != nullptr;
      if (is(embedding) && !is_projected) expect(tensor, 1, hidden);
      return;
    }
    // Towers for images and sound have separate sizes.
    if (std::ranges::none_of(text_layers_, [&](const std::string& begin) { return tensor.name.starts_with(begin); }))
      return;
    // Experts, and heads with compressed queries and keys, have separate sizes.
    if (tensor.name.find("expert") != std::string::npos || find_in_config(config_, "kv_lora_rank") != nullptr) return;
    if (is("self_attn.q_proj.weight")) {
      const auto size = heads(tensor, "num_attention_heads");
      // Some models store one gate per query.
      if (size) note(tensor, 0, *size, tensor.spec.shape[0] % size->value == 0);
      expect(tensor, 1, hidden);
    } else if (is("self_attn.k_proj.weight") || is("self_attn.v_proj.weight")) {
      expect(tensor, 0, heads(tensor, "num_key_value_heads"));
      expect(tensor, 1, hidden);
    } else if (is("self_attn.qkv_proj.weight")) {
      expect(tensor, 0, fused_heads());
      expect(tensor, 1, hidden);
    } else if (is("self_attn.o_proj.weight")) {
      expect(tensor, 0, hidden);
      expect(tensor, 1, heads(tensor, "num_attention_heads"));
    } else if (is("mlp.gate_proj.weight") || is("mlp.up_proj.weight")) {
      expect(tensor, 0, number("intermediate_size"));
      expect(tensor, 1, hidden);
    } else if (is("mlp.down_proj.weight")) {
      expect(tensor, 0, hidden);
      expect(tensor, 1, number("intermediate_size"));
    }
  }

  [[nodiscard]] std::optional<Size> number(std::string_view key) const {
    // Alternative names are not searched: a config without key-value heads may have different numbers in each layer.
    const auto value = number_of(find_here_or_in_text(config_, key));
    if (!value) return std::nullopt;
    return Size{fmt::format("\"{}\" {}", key, *value), *value};
  }

  // Without "head_dim", the queries of the same layer determine the size of a head.
  [[nodiscard]] std::optional<Size> heads(const NamedSpec& tensor, std::string_view key) const {
    const auto count = number(key);
    if (!count) return std::nullopt;
    if (const auto size = model_number(config_, "head_dim"))
      return Size{fmt::format("{} x \"head_dim\" {}", count->words, *size), count->value * *size};
    const auto queries = number("num_attention_heads");
    const auto found =
        by_name_.find(tensor.name.substr(0, tensor.name.rfind("self_attn.")) + "self_attn.q_proj.weight");
    if (!queries || found == by_name_.end() || !is_plain(*found->second)) return std::nullopt;
    const std::int64_t rows = found->second->shape.front();
    return Size{fmt::format("{} x {} rows of queries / {}", count->words, rows, queries->words),
                rows / queries->value * count->value};
  }

  [[nodiscard]] std::optional<Size> fused_heads() const {
    const auto queries = number("num_attention_heads");
    const auto keys = number("num_key_value_heads");
    const auto size = model_number(config_, "head_dim");
    if (!queries || !keys || !size) return std::nullopt;
    return Size{fmt::format("({} + 2 x {}) x \"head_dim\" {}", queries->words, keys->words, *size),
                (queries->value + 2 * keys->value) * *size};
  }

  void expect(const NamedSpec& tensor, std::size_t dim, const std::optional<Size>& size) {
    if (size) note(tensor, dim, *size, tensor.spec.shape[dim] == size->value);
  }
  void note(const NamedSpec& tensor, std::size_t dim, const Size& size, bool fits) {
    // The part after the layer's number: "self_attn.k_proj.weight".
    const std::size_t module = tensor.name.rfind('.', tensor.name.rfind("_proj"));
    const std::size_t layer = tensor.name.rfind('.', module - 1);
    Fits& kind = fits_[tensor.name.substr(layer + 1) + char('0' + static_cast<int>(dim))];
    kind.any = kind.any || fits;
    if (!fits && kind.misfit.empty()) kind.misfit = misfit(tensor, dim, size);
  }

  static std::string misfit(const NamedSpec& tensor, std::size_t dim, const Size& size) {
    return fmt::format("tensor {} is {}, but dimension {} must be {} ({})", in_quotes(tensor.name),
                       to_string(tensor.spec), dim, size.value, size.words);
  }
  [[noreturn]] static void refuse(const std::string& words) {
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("the model contradicts its config.json: {}. Correct the plan, the layout or config.json", words));
  }

  const Config& config_;
  std::span<const NamedSpec> model_;
  std::unordered_map<std::string, const TensorSpec*> by_name_;
  std::set<std::int64_t> layers_;
  struct Fits {
    bool any = false;
    std::string misfit = {};  // the first misfit
  };
  std::map<std::string, Fits> fits_;      // by kind of tensor and dimension
  std::vector<std::string> text_layers_;  // prefixes of their names
};

}  // namespace

const Config* find_place(const Config& tree, std::string_view place) {
  if (tree.is_array()) {
    const std::string_view number = place.substr(0, place.find('.'));
    std::size_t index = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
    if (error != std::errc() || end != number.data() + number.size() || index >= tree.size()) return nullptr;
    const Config& item = tree.at(index);
    return number.size() == place.size() ? &item : find_place(item, place.substr(number.size() + 1));
  }
  if (!tree.is_object()) return nullptr;
  if (const Config* member = tree.as_object().find(place)) return member;
  // Keys may contain dots: shorter keys are tried first.
  for (std::size_t dot = place.find('.'); dot != std::string_view::npos; dot = place.find('.', dot + 1)) {
    const Config* member = tree.as_object().find(place.substr(0, dot));
    if (member == nullptr) continue;
    if (const Config* found = find_place(*member, place.substr(dot + 1))) return found;
  }
  return nullptr;
}

const Config* find_in_config(const Config& config, std::string_view path) {
  const Config* found = find_here_or_in_text(config, path);
  for (const auto& [name, other] : other_names)
    if (name == path && (found == nullptr || found->is_null())) found = find_here_or_in_text(config, other);
  return found;
}

std::optional<std::int64_t> model_number(const Config& config, std::string_view path) {
  return number_of(find_in_config(config, path));
}

std::optional<std::int64_t> head_size(const Config& config) {
  if (const auto size = model_number(config, "head_dim")) return size;
  const auto hidden = model_number(config, "hidden_size");
  const auto heads = model_number(config, "num_attention_heads");
  if (!hidden || !heads || *hidden % *heads != 0) return std::nullopt;
  return *hidden / *heads;
}

void check_against_config(const MergePlan& plan, std::span<const NamedSpec> model) {
  if (!plan.model_config().is_null()) ConfigCheck(plan, model)();
}

// Determines numbers that config.json omits. Config classes of transformers write a nested config without the values
// that equal their defaults; the published configs of Gemma 3 and LLaVA are examples.
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

// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/base_model.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/foreign/torch_archive.hpp"

namespace muster {
namespace {

/// Models are loaded as one of these.
bool is_wide_float(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

constexpr std::array<std::string_view, 3> embeddings_of_words = {"embed_tokens.weight", "wte.weight",
                                                                 "word_embeddings.weight"};
constexpr std::array<std::string_view, 2> heads = {"lm_head.weight", "embed_out.weight"};

bool ends_with_any(std::string_view name, std::span<const std::string_view> ends) {
  return std::ranges::any_of(ends, [&](std::string_view end) { return name.ends_with(end); });
}
bool has_any(std::span<const NamedSpec> model, std::span<const std::string_view> ends) {
  return std::ranges::any_of(model, [&](const NamedSpec& tensor) { return ends_with_any(tensor.name, ends); });
}

bool is_quantised(std::span<const NamedSpec> model) {
  return std::ranges::any_of(model, [](const NamedSpec& tensor) {
    const std::string_view dtype = to_string(tensor.spec.dtype);
    const bool is_narrow = dtype.starts_with("F8") || dtype.starts_with("F4") || is_packed(tensor.spec.dtype);
    return is_narrow || tensor.name.find("scale") != std::string::npos || tensor.name.ends_with("qweight") ||
           tensor.name.ends_with("weight_packed") || tensor.name.ends_with("_blocks");
  });
}

/// As torch and config.json call it; empty if there is none.
std::string_view most_used(std::span<const NamedSpec> model) {
  std::map<DType, std::int64_t> elements;
  for (const NamedSpec& tensor : model)
    if (is_wide_float(tensor.spec.dtype)) elements[tensor.spec.dtype] += element_count(tensor.spec.shape);
  const auto most = std::ranges::max_element(elements, {}, [](const auto& item) { return item.second; });
  return most == elements.end() ? std::string_view() : foreign::torch_name(most->first);
}

/// Of the config and of those in it that say a dtype of their own.
bool set_dtype(Config& config, std::string_view dtype) {
  bool is_changed = false;
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!config.contains(key) || !config[key].is_string() || config[key].as_string() == dtype) continue;
    config[key] = std::string(dtype);
    is_changed = true;
  }
  std::vector<std::string> inner;
  for (const auto& [key, value] : config.as_object())
    if (value.is_object() && key.ends_with("_config") && key != "quantization_config") inner.push_back(key);
  for (const std::string& key : inner) is_changed = set_dtype(config[key], dtype) || is_changed;
  return is_changed;
}

}  // namespace

void check_base(const Config& config, std::span<const NamedSpec> model) {
  const Config* tied = find_in_config(config, "tie_word_embeddings");
  if (tied == nullptr || tied->type() != Config::Type::boolean) return;
  if (!tied->as_bool() && has_any(model, embeddings_of_words) && !has_any(model, heads))
    throw Error(
        ErrorKind::argument,
        "config.json says that the head is not tied to the embeddings (\"tie_word_embeddings\" false), and there "
        "is no lm_head.weight; take the config.json of this model, or set it to true");
}

void leave_out_tied_head(const Config& config, Arrangement& arrangement, std::vector<std::string>& notes) {
  const Config* tied = find_in_config(config, "tie_word_embeddings");
  if (tied == nullptr || tied->type() != Config::Type::boolean || !tied->as_bool()) return;
  std::vector<ArrangedTensor>& tensors = arrangement.tensors;
  const auto only = [&](std::span<const std::string_view> ends) {
    const auto is = [&](const ArrangedTensor& tensor) { return ends_with_any(tensor.name, ends); };
    return std::ranges::count_if(tensors, is) == 1 ? std::ranges::find_if(tensors, is) : tensors.end();
  };
  const auto head = only(heads);
  const auto embeddings = only(embeddings_of_words);
  if (head == tensors.end() || embeddings == tensors.end()) return;
  if (head->layout.target != embeddings->layout.target)
    throw Error(
        ErrorKind::argument,
        fmt::format("config.json ties the head to the embeddings (\"tie_word_embeddings\" true), and {} is {}, {} "
                    "is {}; take the config.json of this model, or set it to false",
                    in_quotes(head->name), to_string(head->layout.target), in_quotes(embeddings->name),
                    to_string(embeddings->layout.target)));
  if (head->sources.size() != embeddings->sources.size()) {
    notes.push_back(
        fmt::format("config.json ties {} to {}, which ranks were cut for in another way: they are not compared, and "
                    "programs that load the model leave the first out",
                    in_quotes(head->name), in_quotes(embeddings->name)));
    return;
  }
  for (std::size_t i = 0; i < head->sources.size(); ++i)
    embeddings->equal.push_back({embeddings->sources[i], head->sources[i]});
  embeddings->equal.insert(embeddings->equal.end(), head->equal.begin(), head->equal.end());
  arrangement.dropped.push_back(
      to_dropped(std::move(*head), fmt::format("config.json ties it to {}", in_quotes(embeddings->name))));
  tensors.erase(head);
}

DroppedTensor to_dropped(ArrangedTensor tensor, std::string reason) {
  std::vector<SourceRef> sources = std::move(tensor.sources);
  for (const auto& set : tensor.equal) sources.insert(sources.end(), set.begin(), set.end());
  sources.insert(sources.end(), tensor.unused.begin(), tensor.unused.end());
  return {std::move(tensor.origin), tensor.rule, std::move(sources), std::move(reason)};
}

std::optional<std::string> updated_config(const Config& config, std::span<const NamedSpec> model,
                                          std::vector<std::string>& notes) {
  Config updated = config;
  bool is_changed = false;
  if (const std::string_view dtype = most_used(model); !dtype.empty() && set_dtype(updated, dtype)) {
    notes.push_back(fmt::format("config.json says {} now, as the tensors are", dtype));
    is_changed = true;
  }
  const bool quantised = is_quantised(model);
  if (updated.contains("quantization_config") && !quantised) {
    updated.as_object().erase("quantization_config");
    notes.push_back("config.json has no \"quantization_config\" any more: none of the tensors is quantised");
    is_changed = true;
  } else if (!updated.contains("quantization_config") && quantised) {
    notes.push_back("tensors are quantised, and config.json has no \"quantization_config\"");
  }
  if (!is_changed) return std::nullopt;
  return to_json(updated, 2) + "\n";
}

}  // namespace muster

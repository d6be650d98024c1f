// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/base_model.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/foreign/torch_archive.hpp"
#include "src/checkpoint/packed_parts.hpp"
#include "src/core/json_text.hpp"

namespace muster {
namespace {

constexpr std::array<std::string_view, 3> embeddings_of_words = {"embed_tokens.weight", "wte.weight",
                                                                 "word_embeddings.weight"};
constexpr std::array<std::string_view, 2> heads = {"lm_head.weight", "embed_out.weight"};

bool ends_with_any(std::string_view name, std::span<const std::string_view> ends) {
  return std::ranges::any_of(ends, [&](std::string_view end) { return name.ends_with(end); });
}
bool has_any(std::span<const NamedSpec> model, std::span<const std::string_view> ends) {
  return std::ranges::any_of(model, [&](const NamedSpec& tensor) { return ends_with_any(tensor.name, ends); });
}

/// A range of a text and its replacement.
struct TextEdit {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::string text = {};
};

/// Changes the dtype of the config that begins at a byte of a text, and of the configs in it.
void set_dtype(std::string_view text, std::size_t begin, const std::string& dtype, std::vector<TextEdit>& edits) {
  for (const core::JsonMember& member : core::members_of(text, begin)) {
    const std::string_view value = text.substr(member.value, member.end - member.value);
    const bool is_dtype = (member.key == "dtype" || member.key == "torch_dtype") && value.starts_with('"');
    if (is_dtype && value != dtype) edits.push_back({member.value, member.end, dtype});
    if (value.starts_with('{') && member.key.ends_with("_config") && member.key != "quantization_config")
      set_dtype(text, member.value, dtype, edits);
  }
}

/// Erases a member of the outermost object, with one of the commas beside it. Returns false if the member does not
/// exist.
bool erase_member(std::string& text, std::string_view key) {
  const std::vector<core::JsonMember> members = core::members_of(text);
  const auto member = std::ranges::find(members, key, &core::JsonMember::key);
  if (member == members.end()) return false;
  const bool is_last = member + 1 == members.end();
  const std::size_t begin = is_last && member != members.begin() ? (member - 1)->end : member->begin;
  text.erase(begin, (is_last ? member->end : (member + 1)->begin) - begin);
  return true;
}

}  // namespace

bool is_wide_float(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

std::optional<DType> most_used_float(std::span<const NamedSpec> model) {
  std::map<DType, std::int64_t> elements;
  for (const NamedSpec& tensor : model)
    if (is_wide_float(tensor.spec.dtype)) elements[tensor.spec.dtype] += element_count(tensor.spec.shape);
  const auto most = std::ranges::max_element(elements, {}, [](const auto& item) { return item.second; });
  return most == elements.end() ? std::nullopt : std::optional(most->first);
}

void check_base(const Config& config, std::span<const NamedSpec> model) {
  const Config* tied = find_in_config(config, "tie_word_embeddings");
  if (tied == nullptr || tied->type() != Config::Type::boolean) return;
  if (!tied->as_bool() && has_any(model, embeddings_of_words) && !has_any(model, heads))
    throw Error(
        ErrorKind::argument,
        "config.json says that the head is not tied to the embeddings (\"tie_word_embeddings\" false), and there "
        "is no lm_head.weight; take the config.json of this model, or set it to true");
}

void leave_out_tied_head(const Config& config, const BaseTensors& base, Arrangement& arrangement,
                         std::vector<std::string>& notes) {
  const Config* tied = find_in_config(config, "tie_word_embeddings");
  const bool is_said = tied != nullptr && tied->type() == Config::Type::boolean;
  const auto in_base = [&](std::span<const std::string_view> ends) {
    return std::ranges::any_of(base, [&](const auto& tensor) { return ends_with_any(tensor.first, ends); });
  };
  // Many tied models lack the key in their config.json: then the base has no head either.
  if (is_said ? !tied->as_bool() : !in_base(embeddings_of_words) || in_base(heads)) return;
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
  // Parts can be compared only if both were cut at the same positions: TensorRT-LLM cuts the head, but not the
  // embeddings.
  const auto cut_of = [](const ArrangedTensor& tensor) {
    return std::tie(tensor.layout.grain, tensor.layout.source_units, tensor.layout.pieces, tensor.layout.must_equal);
  };
  if (head->sources.size() != embeddings->sources.size() || cut_of(*head) != cut_of(*embeddings)) {
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

std::optional<std::string> updated_config(const std::string& text, std::span<const NamedSpec> model,
                                          std::vector<std::string>& notes) {
  // Only these ranges change: everything else remains as its author wrote it.
  std::string updated = text;
  if (const auto most = most_used_float(model)) {
    const std::string_view dtype = foreign::torch_name(*most);
    std::vector<TextEdit> edits;
    set_dtype(text, 0, fmt::format("\"{}\"", dtype), edits);
    // Not std::views::reverse: clang 14 cannot compile it with GCC's library.
    std::ranges::reverse(edits);
    for (const TextEdit& edit : edits) updated.replace(edit.begin, edit.end - edit.begin, edit.text);
    if (!edits.empty()) notes.push_back(fmt::format("config.json says {} now, as the tensors are", dtype));
  }
  constexpr std::string_view quantization = "quantization_config";
  const bool has_quantization = std::ranges::count(core::members_of(text), quantization, &core::JsonMember::key) != 0;
  if (!PackedParts(model).any()) {
    while (erase_member(updated, quantization)) {
    }
    if (has_quantization)
      notes.push_back("config.json has no \"quantization_config\" any more: none of the tensors is quantised");
  } else if (!has_quantization) {
    notes.push_back("tensors are quantised, and config.json has no \"quantization_config\"");
  }
  if (updated == text) return std::nullopt;
  return updated;
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/assembly/base_model.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_survey.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/viewed_tensors.hpp"
#include "src/checkpoint/thirdparty/torch_archive.hpp"
#include "src/formats/json_text.hpp"

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

/// Erases a member of the outermost object, with one of the commas next to it. Returns false if the member does not
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

void refuse_selection(const Request& request) {
  throw Error(ErrorKind::invalid_argument, fmt::format("no tensor matches --select {} and --exclude {}",
                                                       in_quotes(request.select), in_quotes(request.exclude)));
}

void check_base(const Config& config, std::span<const NamedSpec> model) {
  const Config* tied = find_in_config(config, "tie_word_embeddings");
  if (tied == nullptr || tied->type() != Config::Type::boolean) return;
  if (!tied->as_bool() && has_any(model, embeddings_of_words) && !has_any(model, heads))
    throw Error(ErrorKind::invalid_argument,
                "config.json: \"tie_word_embeddings\" is false, and lm_head.weight does not exist. Use the config.json "
                "of this model, or set the key to true");
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
    throw Error(ErrorKind::invalid_argument,
                fmt::format("config.json: \"tie_word_embeddings\" is true, but {} is {}, and {} is {}. Use the "
                            "config.json of this model, or set the key to false",
                            in_quotes(head->name), to_string(head->layout.target), in_quotes(embeddings->name),
                            to_string(embeddings->layout.target)));
  // Parts can be compared only if both were cut at the same positions: TensorRT-LLM cuts the head, but not the
  // embeddings.
  const auto cut_of = [](const ArrangedTensor& tensor) {
    const merge::Layout& layout = tensor.layout;
    return std::tie(layout.grain, layout.source_units, layout.pieces, layout.must_equal, layout.bands);
  };
  if (head->sources.size() != embeddings->sources.size() || cut_of(*head) != cut_of(*embeddings)) {
    notes.push_back(
        fmt::format("config.json ties {0} to {1}, and the two have different layouts: they are not compared, and "
                    "programs that load the model ignore {0}",
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
    const std::string_view dtype = thirdparty::torch_name(*most);
    std::vector<TextEdit> edits;
    set_dtype(text, 0, fmt::format("\"{}\"", dtype), edits);
    // Not std::views::reverse: clang 14 cannot compile it with GCC's library.
    std::ranges::reverse(edits);
    for (const TextEdit& edit : edits) updated.replace(edit.begin, edit.end - edit.begin, edit.text);
    if (!edits.empty()) notes.push_back(fmt::format("config.json now has the dtype {} of the tensors", dtype));
  }
  constexpr std::string_view quantization = "quantization_config";
  const bool has_quantization = std::ranges::count(core::members_of(text), quantization, &core::JsonMember::key) != 0;
  if (!PackedParts(model).any()) {
    while (erase_member(updated, quantization)) {
    }
    if (has_quantization)
      notes.push_back("\"quantization_config\" is removed from config.json: no tensor is quantised");
  } else if (!has_quantization) {
    notes.push_back("tensors are quantised, but config.json has no \"quantization_config\"");
  }
  if (updated == text) return std::nullopt;
  return updated;
}

namespace {

/// A prefix that a wrapper adds to names, and the name of the wrapper.
struct Wrapper {
  std::string_view prefix;
  std::string_view by;
};
// Prefixes of all names of a model.
constexpr std::array<Wrapper, 3> outer_wrappers = {
    {{"module.", "DistributedDataParallel"},
     {"base_model.model.", "PEFT"},
     {"model.", "a program that saved the model as a part of another one"}}};
// Prefixes in front of any module's name. No model uses such names itself.
constexpr std::array<Wrapper, 4> inner_wrappers = {{{"_orig_mod.", "torch.compile"},
                                                    {"_forward_module.", "Lightning Fabric"},
                                                    {"_fsdp_wrapped_module.", "FullyShardedDataParallel"},
                                                    {"_checkpoint_wrapped_module.", "activation checkpointing"}}};

std::string without(std::string name, std::string_view part) {
  for (std::size_t at = 0; (at = name.find(part, at)) != std::string::npos;)
    if (at == 0 || name[at - 1] == '.')
      name.erase(at, part.size());
    else
      ++at;
  return name;
}

bool is_of_adapter(std::string_view name) {
  return name.find(".lora_") != std::string_view::npos || name.find("modules_to_save") != std::string_view::npos;
}

/// The tensors whose names may be changed: all but those of shards that Muster cut with a plan.
class WrappedNames {
 public:
  WrappedNames(std::vector<ShardListing>& listings, const BaseTensors& base) : base_(base) {
    for (ShardListing& listing : listings)
      if (!listing.facts || listing.facts->is_whole())
        for (NamedSpec& tensor : listing.tensors) names_.push_back(&tensor.name);
  }

  [[nodiscard]] bool any(const auto& is_one) const {
    return std::ranges::any_of(names_, [&](const std::string* name) { return is_one(*name); });
  }

  /// Returns the removable prefixes that all names have, from the outside in. If there is a base, returns the prefixes
  /// whose removal makes the most names match the base.
  [[nodiscard]] std::vector<const Wrapper*> outer(const auto& may_go) const {
    std::vector<const Wrapper*> chain;
    std::vector<const Wrapper*> best;
    std::size_t cut = 0;
    auto most = in_base(0);
    for (bool again = !names_.empty(); again;) {
      again = false;
      for (const Wrapper& wrapper : outer_wrappers) {
        if (!may_go(wrapper) || !is_in_front(wrapper, cut)) continue;
        chain.push_back(&wrapper);
        cut += wrapper.prefix.size();
        again = true;
        if (base_.empty() || in_base(cut) > most) {
          best = chain;
          most = in_base(cut);
        }
        break;
      }
    }
    return best;
  }

  void change(const auto& new_name) {
    for (std::string* name : names_) *name = new_name(std::move(*name));
  }

 private:
  [[nodiscard]] std::ptrdiff_t in_base(std::size_t cut) const {
    return std::ranges::count_if(names_, [&](const std::string* name) { return base_.contains(name->substr(cut)); });
  }

  [[nodiscard]] bool is_in_front(const Wrapper& wrapper, std::size_t cut) const {
    const auto rest = [&](const std::string& name) { return std::string_view(name).substr(cut); };
    if (any([&](const std::string& name) { return !rest(name).starts_with(wrapper.prefix); })) return false;
    if (wrapper.prefix.starts_with("base_model") && any(is_of_adapter)) return false;
    // Models use the prefix "model." themselves. Without a base, only a second "model." is the prefix of a wrapper.
    return !base_.empty() || wrapper.prefix != "model." ||
           any([&](const std::string& name) { return rest(name).starts_with("model.model."); });
  }

  const BaseTensors& base_;
  std::vector<std::string*> names_;
};

/// Returns whether a plan handles the prefix itself.
bool is_in_plan(const MergePlan& plan, std::string_view prefix) {
  const auto names_it = [&](const auto& rule) { return rule.pattern.text().find(prefix) != std::string::npos; };
  const bool is_common = prefix == "model.";
  return !plan.at().empty() ||
         (!is_common && (std::ranges::any_of(plan.views(), names_it) || std::ranges::any_of(plan.rules(), names_it)));
}

void check_unique(const std::vector<ShardListing>& listings) {
  for (const ShardListing& listing : listings) {
    std::set<std::string_view> names;
    for (const NamedSpec& tensor : listing.tensors)
      if (!names.insert(tensor.name).second)
        throw Error(
            ErrorKind::invalid_argument,
            fmt::format("rank {}: two tensors are named {} without the prefixes of wrappers. Save only one of them",
                        listing.rank, in_quotes(tensor.name)),
            {.rank = listing.rank});
  }
}

/// Returns true for buffers that programs compute when they load a model. Files may contain them or not.
bool is_computed(std::string_view name, const std::optional<TensorSpec>& spec) {
  for (const std::string_view end : {"rotary_emb.inv_freq", "position_ids", "masked_bias", "rope.freqs"})
    if (name.ends_with(end)) return true;
  // The attention mask of GPT-2 and similar models.
  return (name.ends_with("attn.bias") || name.ends_with("attention.bias")) &&
         (!spec || (spec->shape.size() == 4 && spec->shape[0] == 1 && spec->shape[1] == 1));
}

/// Returns true for the second name of a tied tensor, which files may leave out.
bool is_second_name(std::string_view name, const Config* config, const auto& has_ending) {
  const auto one_of = [&](std::initializer_list<std::string_view> ends) {
    return std::ranges::any_of(ends, [&](std::string_view end) { return name.ends_with(end); });
  };
  if (one_of({"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}) && has_ending("shared.weight"))
    return true;
  const Config* tied = config == nullptr ? nullptr : find_in_config(*config, "tie_word_embeddings");
  const bool is_said = tied != nullptr && tied->type() == Config::Type::boolean;
  if (is_said && !tied->as_bool()) return false;
  if (is_said && one_of({"lm_head.weight", "embed_out.weight"})) return true;
  return one_of({"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "lm_head.decoder.weight",
                 "lm_head.decoder.bias", "proj_out.weight"});
}

class Comparison {
 public:
  Comparison(const Request& request, const Config* config, std::span<const NamedSpec> model, const BaseTensors& base)
      : request_(request), config_(config), model_(model), base_(base), parts_(model), base_parts_(known(base)) {
    for (const NamedSpec& tensor : model) by_name_.emplace(tensor.name, &tensor.spec);
  }

  void operator()(std::vector<std::string>& notes) {
    find_differences();
    pair_prefixes(notes);
    refuse_names();
    compare_specs(notes);
  }

 private:
  static std::vector<NamedSpec> known(const BaseTensors& base) {
    std::vector<NamedSpec> tensors;
    for (const auto& [name, spec] : base) tensors.push_back({name, spec.value_or(TensorSpec{DType::f32, {}})});
    return tensors;
  }

  void find_differences() {
    const TensorSelection selection(request_);
    const auto in_model = [&](std::string_view end) {
      return std::ranges::any_of(model_, [&](const NamedSpec& tensor) { return tensor.name.ends_with(end); });
    };
    const auto in_base = [&](std::string_view end) {
      return std::ranges::any_of(base_, [&](const auto& tensor) { return tensor.first.ends_with(end); });
    };
    for (const NamedSpec& tensor : model_) {
      if (base_.contains(tensor.name)) continue;
      if (is_computed(tensor.name, tensor.spec) || is_second_name(tensor.name, config_, in_base)) continue;
      if (is_quantised_on_one_side(tensor.name)) continue;
      extra_.push_back(tensor.name);
    }
    for (const auto& [name, spec] : base_) {
      if (by_name_.contains(name) || !selection.has(name)) continue;
      if (is_computed(name, spec) || is_second_name(name, config_, in_model)) continue;
      if (is_quantised_on_one_side(name)) continue;
      missing_.push_back(name);
    }
  }

  /// Quantised weights and their scales are compared only with other quantised weights.
  [[nodiscard]] bool is_quantised_on_one_side(const std::string& name) const {
    const bool here = parts_.is_in_packed_module(name);
    const bool there = base_parts_.is_in_packed_module(name);
    return here != there || (!here && parts_.has({name, TensorSpec{DType::f32, {1}}}));
  }

  /// Programs load "model.layers.0" as "layers.0" and vice versa if all names differ by this prefix.
  void pair_prefixes(std::vector<std::string>& notes) {
    const auto all_in = [](const std::vector<std::string>& longer, const std::vector<std::string>& shorter) {
      const std::string prefix = longer.front().substr(0, longer.front().find('.') + 1);
      if (prefix.empty()) return std::string();
      const std::set<std::string> others(longer.begin(), longer.end());
      const bool fits = longer.size() == shorter.size() &&
                        std::ranges::all_of(shorter, [&](const auto& name) { return others.contains(prefix + name); });
      return fits ? prefix : std::string();
    };
    if (missing_.empty() || extra_.empty()) return;
    const std::string mine = all_in(extra_, missing_);
    const std::string theirs = mine.empty() ? all_in(missing_, extra_) : std::string();
    if (mine.empty() && theirs.empty()) return;
    notes.push_back(fmt::format("names begin with {} {}, and without that prefix {}; programs load both",
                                in_quotes(mine.empty() ? theirs : mine),
                                mine.empty() ? "in the base model" : "in the result",
                                mine.empty() ? "in the result" : "in the base model"));
    mine_ = mine;
    theirs_ = theirs;
    missing_.clear();
    extra_.clear();
  }

  void refuse_names() const {
    if (missing_.empty() && extra_.empty()) return;
    const auto words = [](const std::vector<std::string>& names) {
      return fmt::format("tensor{} {}", names.size() == 1 ? "" : "s", some_names(names));
    };
    std::string text =
        fmt::format("the tensors of the result and of the base model {} differ: ", in_quotes(request_.base_model));
    if (!missing_.empty()) text += fmt::format("the result lacks the {}", words(missing_));
    if (!extra_.empty())
      text += fmt::format("{}the base model lacks the {}", missing_.empty() ? "" : "; ", words(extra_));
    text += ". Pass another --base-model, --plan or --key, or leave tensors out with --select or --exclude";
    throw Error(ErrorKind::invalid_argument, text, {.path = request_.path});
  }

  [[nodiscard]] const TensorSpec* in_base(const std::string& name) const {
    std::string other = name;
    if (!mine_.empty() && name.starts_with(mine_)) other = name.substr(mine_.size());
    if (!theirs_.empty() && !base_.contains(name)) other = theirs_ + name;
    const auto found = base_.find(other);
    return found == base_.end() || !found->second ? nullptr : &*found->second;
  }

  void compare_specs(std::vector<std::string>& notes) const {
    std::set<DType> floats;
    std::vector<const NamedSpec*> others;
    for (const NamedSpec& tensor : model_) {
      if (is_wide_float(tensor.spec.dtype)) floats.insert(tensor.spec.dtype);
      const TensorSpec* there = in_base(tensor.name);
      if (there == nullptr || is_quantised_on_one_side(tensor.name) || is_computed(tensor.name, tensor.spec)) continue;
      if (there->shape != tensor.spec.shape)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("tensor {}: it is {}, and {} in the base model {}. Correct the plan or the layout, or "
                                "pass the --base-model of this model",
                                in_quotes(tensor.name), to_string(tensor.spec), to_string(*there),
                                in_quotes(request_.base_model)),
                    {.path = request_.path});
      if (there->dtype != tensor.spec.dtype) others.push_back(&tensor);
    }
    if (request_.dtype || others.empty()) return;
    const NamedSpec& first = *others.front();
    const std::string words = fmt::format(
        "{} of {} tensors have a different dtype in the base model: {} is {}, and {} in the base model", others.size(),
        model_.size(), in_quotes(first.name), to_string(first.spec.dtype), to_string(in_base(first.name)->dtype));
    const bool is_uniform = floats.size() == 1 && std::ranges::all_of(others, [](const NamedSpec* tensor) {
                              return is_wide_float(tensor->spec.dtype);
                            });
    if (!is_uniform)
      throw Error(ErrorKind::invalid_argument, words + ". Pass --dtype to cast them", {.path = request_.path});
    notes.push_back(words);
  }

  const Request& request_;
  const Config* config_;
  std::span<const NamedSpec> model_;
  const BaseTensors& base_;
  PackedParts parts_;
  PackedParts base_parts_;
  std::map<std::string, const TensorSpec*, std::less<>> by_name_;
  std::vector<std::string> extra_;
  std::vector<std::string> missing_;
  std::string mine_;    // prefix of all names of the result that the names of the base lack
  std::string theirs_;  // prefix of all names of the base that the names of the result lack
};

/// For each stack of layers ("model.layers") and each layer's number: the rest of the names of its tensors.
using Stacks = std::map<std::string, std::map<std::int64_t, std::set<std::string>>>;

Stacks stacks_of(std::span<const NamedSpec> model) {
  constexpr std::size_t most_digits = 6;
  Stacks stacks;
  for (const NamedSpec& tensor : model) {
    const std::string& name = tensor.name;
    for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
      const std::size_t end = std::min(name.find('.', dot + 1), name.size());
      const std::string word = name.substr(dot + 1, end - dot - 1);
      if (word.empty() || word.size() > most_digits || word.find_first_not_of("0123456789") != std::string::npos ||
          end == name.size())
        continue;
      stacks[name.substr(0, dot)][std::stoll(word)].insert(name.substr(end + 1));
      break;
    }
  }
  return stacks;
}

/// Returns true for tensors that some layers lack by design.
bool may_lack(std::string_view name) {
  for (const std::string_view part : {"attn_norm", "relative_attention_bias", "input_scale", "output_scale"})
    if (name.find(part) != std::string_view::npos) return true;
  return false;
}

/// Throws Error(invalid_argument) if a single layer lacks tensors that several other layers have: it was not saved
/// completely.
void check_layers_alike(const Request& request, std::span<const NamedSpec> model) {
  if (std::ranges::any_of(model, [](const NamedSpec& tensor) { return is_of_adapter(tensor.name); })) return;
  const PackedParts parts(model);
  // A quantisation may exclude layers. These have plain weights and no scales.
  const auto is_scale_of_others = [&](const std::string& stack, std::int64_t layer, std::int64_t other,
                                      const std::string& name) {
    const auto there = std::ranges::find(model, fmt::format("{}.{}.{}", stack, other, name), &NamedSpec::name);
    const bool is_packed_weight = PackedParts(std::span(&*there, 1)).any() && weights_of_scale(there->name).empty();
    return !is_packed_weight && parts.has(*there) &&
           !parts.is_in_packed_module(fmt::format("{}.{}.{}", stack, layer, name));
  };
  for (const auto& [stack, layers] : stacks_of(model)) {
    std::map<std::set<std::string>, std::vector<std::int64_t>> kinds;
    for (const auto& [number, names] : layers) kinds[names].push_back(number);
    for (const auto& [names, numbers] : kinds) {
      if (numbers.size() != 1) continue;
      for (const auto& [more, others] : kinds) {
        if (more.size() <= names.size() || !std::ranges::includes(more, names)) continue;
        if (others.size() < 2 && kinds.size() != 2) continue;
        std::vector<std::string> lacking;
        std::ranges::set_difference(more, names, std::back_inserter(lacking));
        std::erase_if(lacking, [&, &stack = stack, &numbers = numbers, &others = others](const std::string& name) {
          return may_lack(name) || is_scale_of_others(stack, numbers.front(), others.front(), name);
        });
        if (lacking.empty()) continue;
        for (std::string& name : lacking) name = fmt::format("{}.{}.{}", stack, numbers.front(), name);
        throw Error(
            ErrorKind::invalid_argument,
            fmt::format("{} lacks the tensor{} {}, which layer {} has. Save the model completely, or pass "
                        "--base-model with a directory that has weights",
                        in_quotes(request.path), lacking.size() == 1 ? "" : "s", some_names(lacking), others.front()),
            {.path = request.path});
      }
    }
  }
}

}  // namespace

BaseTensors base_tensors(const std::string& directory, std::vector<std::string>& notes) {
  BaseTensors tensors;
  const DirectoryNames names = names_in(directory);
  const auto add = [&](const std::vector<TensorEntry>& entries) {
    for (const TensorEntry& entry : entries) tensors.emplace(entry.name, TensorSpec{entry.dtype, entry.shape});
  };
  const auto add_index = [&](const ModelSurvey& survey, std::string_view reason) {
    notes.push_back(fmt::format("the weights of the base model cannot be read ({})", reason));
    for (const auto& [name, file] : survey.weights) tensors.emplace(name, std::nullopt);
  };
  const ModelSurvey survey = survey_model(directory, names.files);
  if (!survey.names.empty() || !survey.index.empty()) {
    const auto refused =
        std::ranges::find(survey.findings, Severity::refused, [](const Finding& one) { return one.severity; });
    if (refused == survey.findings.end())
      for (const SurveyedFile& opened : survey.files) add(opened.file.tensors());
    else
      add_index(survey, refused->problem.message);
    return tensors;
  }
  try {
    const auto found = thirdparty::find_in_directory(directory, names, {});
    std::vector<std::string> more;
    if (!found || found->kind != thirdparty::CheckpointKind::torch_model) return tensors;
    const auto model = open_checkpoint(*found, 0, {}, more);
    add(model->tensors());
  } catch (const Error& error) {
    tensors.clear();
    add_index(choose_files(directory, names.files, torch_naming), error.what());
  }
  return tensors;
}

void remove_wrappers(const MergePlan& plan, std::vector<ShardListing>& listings, const BaseTensors& base,
                     std::vector<std::string>& notes) {
  WrappedNames names(listings, base);
  bool is_changed = false;
  const auto removed = [&](const Wrapper& wrapper) {
    notes.push_back(fmt::format("the prefix {} is removed from the names of tensors; {} adds it",
                                in_quotes(wrapper.prefix), wrapper.by));
    is_changed = true;
  };
  for (const Wrapper& wrapper : inner_wrappers) {
    const auto is_there = [&](const std::string& name) { return without(name, wrapper.prefix) != name; };
    if (is_in_plan(plan, wrapper.prefix) || !names.any(is_there)) continue;
    names.change([&](std::string name) { return without(std::move(name), wrapper.prefix); });
    removed(wrapper);
  }
  for (const Wrapper* wrapper : names.outer([&](const Wrapper& one) { return !is_in_plan(plan, one.prefix); })) {
    names.change([&](const std::string& name) { return name.substr(wrapper->prefix.size()); });
    removed(*wrapper);
  }
  if (is_changed) check_unique(listings);
}

void compare_with_base(const Request& request, const Config* config, std::span<const NamedSpec> model,
                       const BaseTensors& base, std::vector<std::string>& notes) {
  const bool is_adapter =
      std::ranges::all_of(model, [](const NamedSpec& tensor) { return is_of_adapter(tensor.name); });
  if (is_adapter) return;
  if (!base.empty()) return Comparison(request, config, model, base)(notes);
  // Without a base or a plan, the layers of a model may differ by design.
  const bool has_layers = !request.base_model.empty() || !request.plan.empty();
  if (has_layers && TensorSelection(request).is_all()) check_layers_alike(request, model);
}

}  // namespace muster

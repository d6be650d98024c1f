// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/plan/plan_suggest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/plan/model_config.hpp"

namespace muster {
namespace {

/// Tensors whose names differ only in numbers.
struct SuggestionKind {
  std::string glob;
  const NamedSpec* example = nullptr;
  std::size_t count = 0;
};

/// Returns the name with a star for each number that is a component of its own; the plan refuses glob characters in
/// names.
std::string glob_of(std::string_view name) {
  std::string glob;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t dot = std::min(name.find('.', at), name.size());
    const std::string_view word = name.substr(at, dot - at);
    const bool is_number =
        !word.empty() && std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; }) && at != 0;
    glob += is_number ? "*" : std::string(word);
    if (dot < name.size()) glob += '.';
    at = dot + 1;
  }
  return glob;
}

std::vector<SuggestionKind> kinds_of(std::span<const NamedSpec> model) {
  std::vector<SuggestionKind> kinds;
  std::map<std::string, std::size_t> places;
  for (const NamedSpec& tensor : model) {
    std::string glob = glob_of(tensor.name);
    const auto [place, is_new] = places.try_emplace(glob, kinds.size());
    if (is_new) kinds.push_back({std::move(glob), &tensor, 0});
    ++kinds[place->second].count;
  }
  return kinds;
}

bool has_any(std::string_view name, std::span<const std::string_view> words) {
  return std::ranges::any_of(words, [&](std::string_view word) { return name.find(word) != std::string_view::npos; });
}

constexpr std::array<std::string_view, 7> outputs = {"o_proj", "out_proj", "down", ".wo.", "fc2", "output", "c_proj"};
constexpr std::array<std::string_view, 6> vocabularies = {"embed",          "wte",   "lm_head", "vocab",
                                                          "decoder.weight", "output"};

struct Guess {
  Config rule;
  std::string doubt;  // empty: no doubt
};

class Guessing {
 public:
  Guessing(std::span<const NamedSpec> model, const Config* config) {
    for (const NamedSpec& tensor : model) by_name_.emplace(tensor.name, &tensor.spec);
    if (config == nullptr) return;
    hidden_ = model_number(*config, "hidden_size").value_or(0);
    vocabulary_ = model_number(*config, "vocab_size").value_or(0);
  }

  [[nodiscard]] Guess operator()(const SuggestionKind& kind) const {
    const Shape& shape = kind.example->spec.shape;
    const std::string& name = kind.example->name;
    const auto concat = [&](int dim, std::string doubt) {
      return Guess{Config::object({{"match", kind.glob}, {"action", "concat"}, {"dim", dim}}), std::move(doubt)};
    };
    const auto same = [&](std::string doubt) {
      return Guess{Config::object({{"match", kind.glob}, {"action", "same"}}), std::move(doubt)};
    };
    if (shape.size() == 2 && vocabulary_ != 0 && shape[0] >= vocabulary_ && has_any(name, vocabularies))
      return concat(0, "");
    if (shape.size() < 2) {
      // A bias is cut with its matrix, if that is cut by its outputs.
      const auto weight = by_name_.find(name.substr(0, name.rfind('.') + 1) + "weight");
      const bool is_bias = name.ends_with("bias") && weight != by_name_.end() && weight->second->shape.size() == 2;
      if (is_bias && !is_output(weight->first, weight->second->shape)) return concat(0, "");
      const bool is_small = shape.empty() || shape[0] == hidden_ || name.find("norm") != std::string::npos || is_bias;
      return same(is_small ? "" : "a vector that is neither a norm nor a bias of the hidden size");
    }
    if (shape.size() > 2) return same("more than two dimensions: all ranks have all of it");
    const bool is_out = is_output(name, shape);
    std::string doubt;
    if (hidden_ == 0)
      doubt = "config.json has no \"hidden_size\": guessed by its name";
    else if (shape[0] == shape[1] || (shape[0] != hidden_ && shape[1] != hidden_))
      doubt = fmt::format("its shape {} does not show which dimension is the hidden size; its name {}",
                          to_string(shape), is_out ? "suggests an output" : "does not suggest an output");
    else if (shape[0] % 3 == 0 && !is_out)
      doubt = "fused matrices need \"blocks\" or \"heads\"";
    return concat(is_out ? 1 : 0, std::move(doubt));
  }

 private:
  /// Whether the matrix computes the output of a layer: it is then cut by its inputs.
  [[nodiscard]] bool is_output(std::string_view name, const Shape& shape) const {
    if (hidden_ != 0 && shape[0] == hidden_ && shape[1] != hidden_) return true;
    if (hidden_ != 0 && shape[1] == hidden_ && shape[0] != hidden_) return false;
    return has_any(name, outputs);
  }

  std::map<std::string, const TensorSpec*, std::less<>> by_name_;
  std::int64_t hidden_ = 0;
  std::int64_t vocabulary_ = 0;
};

/// Returns the position of layer numbers: after the component that precedes most numbers.
std::string layers_of(const std::vector<SuggestionKind>& kinds) {
  std::map<std::string, std::size_t> words;
  for (const SuggestionKind& kind : kinds) {
    const std::size_t star = kind.glob.find(".*.");
    if (star == std::string::npos) continue;
    const std::size_t dot = kind.glob.rfind('.', star - 1);
    const std::size_t begin = dot == std::string::npos ? 0 : dot + 1;
    words[kind.glob.substr(begin, star - begin)] += kind.count;
  }
  const auto most = std::ranges::max_element(words, {}, [](const auto& word) { return word.second; });
  return most == words.end() ? std::string() : fmt::format("*{}.#.*", most->first);
}

bool knows(const MergePlan& plan, const std::string& name) {
  const auto fits = [&](const auto& rule) { return rule.pattern.matches(name); };
  return std::ranges::any_of(plan.views(), fits) || plan.find(name) != nullptr;
}

}  // namespace

SuggestedPlan suggest_plan(std::span<const NamedSpec> model, const Config* model_config, bool is_foreign) {
  const std::vector<SuggestionKind> kinds = kinds_of(model);
  std::optional<MergePlan> base;
  std::size_t most = kinds.size() / 2;
  // Among plans with equally many rules, the simplest is chosen.
  std::vector<std::string_view> names = {"llama", "moe"};
  names.insert(names.end(), MergePlan::builtin_names().begin(), MergePlan::builtin_names().end());
  for (const std::string_view name : names) {
    MergePlan plan = MergePlan::load(std::string(name), model_config);
    // A plan with views is for the names of other programs.
    if (!plan.views().empty() && !is_foreign) continue;
    const auto known = static_cast<std::size_t>(
        std::ranges::count_if(kinds, [&](const SuggestionKind& kind) { return knows(plan, kind.example->name); }));
    if (known <= most) continue;
    most = known;
    base = std::move(plan);
  }
  SuggestedPlan suggested;
  Config plan = Config::object({{"muster_plan", 1}});
  if (base) {
    plan["extends"] = base->name();
    suggested.unsure.push_back(
        fmt::format("{} of {} kinds of tensors have a rule of the plan {}: their meaning is guessed by their names",
                    most, kinds.size(), base->name()));
  } else if (const std::string layers = layers_of(kinds); !layers.empty()) {
    plan["layers"] = Config::object({{"match", layers}, {"renumber", true}});
    suggested.unsure.push_back(fmt::format("guessed pattern of layer numbers: {}", in_quotes(layers)));
  }
  plan["rules"] = ConfigArray();
  const Guessing guess(model, model_config);
  for (const SuggestionKind& kind : kinds) {
    if (base && knows(*base, kind.example->name)) continue;
    Guess guessed = guess(kind);
    if (!guessed.doubt.empty()) {
      guessed.rule["comment"] = "unsure: " + guessed.doubt;
      suggested.unsure.push_back(
          fmt::format("{}, {}: {}", in_quotes(kind.glob), to_string(kind.example->spec), guessed.doubt));
    }
    plan["rules"].push_back(std::move(guessed.rule));
  }
  if (plan["rules"].size() == 0) plan.as_object().erase("rules");
  suggested.text = to_json(plan, 2) + "\n";
  return suggested;
}

}  // namespace muster

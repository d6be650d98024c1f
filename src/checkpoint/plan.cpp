// SPDX-License-Identifier: Apache-2.0
// Plans by name: built in, for the model at hand, or from a file; and names through a plan, both ways.

#include "muster/plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/plan_parts.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr std::uintmax_t largest_file = 4 << 20;

std::string read_plan_file(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) {
    throw Error(ErrorKind::io, fmt::format("reading the plan {}: {}", in_quotes(path), error.message()),
                {.path = path, .os_error = error.value()});
  }
  if (size > largest_file) {
    throw Error(ErrorKind::corrupt, fmt::format("the plan {} has {} bytes, more than a plan can have ({})",
                                                in_quotes(path), size, largest_file));
  }
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    throw Error(ErrorKind::io, fmt::format("reading the plan {}: it cannot be read", in_quotes(path)), {.path = path});
  }
  return text;
}

/// A model that a built-in plan is for.
struct KnownModel {
  std::string type;          ///< "model_type"
  std::string architecture;  ///< "architectures" begins with it
  std::string plan;
};

const std::vector<KnownModel>& known_models() {
  static const std::vector<KnownModel> models = [] {
    std::vector<KnownModel> all;
    const Config list = parse_json(builtin_models());
    for (const auto& [plan, of_plan] : list.as_object()) {
      if (!of_plan.is_object()) continue;  // the comment
      for (const auto& [type, architecture] : of_plan.as_object())
        all.push_back({type, architecture.as_string(), plan});
    }
    std::ranges::sort(all, {}, &KnownModel::type);
    return all;
  }();
  return models;
}

bool has_type(const KnownModel& model, std::string_view type) {
  return model.type == type;
}

bool has_architecture(const KnownModel& model, std::string_view architecture) {
  if (!architecture.starts_with(model.architecture)) return false;
  const std::string_view rest = architecture.substr(model.architecture.size());
  if (rest == "ForConditionalGeneration") return false;  // with a vision tower
  return rest.starts_with("For") || rest.starts_with("Model") || rest.starts_with("LMHead");
}

/// A value of config.json that a plan follows from, and which one.
struct Hint {
  std::string words;
  std::string plan;  ///< empty: not known
};

std::vector<Hint> hints_of(const ConfigObject& config) {
  std::vector<Hint> hints;
  const auto add = [&](std::string_view key, const std::string& value, const auto& fits) {
    const auto model =
        std::ranges::find_if(known_models(), [&](const KnownModel& known) { return fits(known, value); });
    hints.push_back(
        {fmt::format("\"{}\" {}", key, in_quotes(value)), model == known_models().end() ? "" : model->plan});
  };
  const Config* type = config.find("model_type");
  if (type != nullptr && type->is_string()) add("model_type", type->as_string(), has_type);
  const Config* list = config.find("architectures");
  if (list == nullptr || !list->is_array()) return hints;
  for (const Config& item : list->as_array())
    if (item.is_string() && hints.size() < 16) add("architectures", item.as_string(), has_architecture);
  return hints;
}

/// The built-in plan that a model's config.json stands for.
std::string plan_for_model(const Config* model_config) {
  const auto refuse = [](const std::string& words) {
    throw Error(ErrorKind::argument,
                fmt::format("choosing a plan by config.json: {}; name one with --plan ({}, or a file)", words,
                            fmt::join(MergePlan::builtin_names(), ", ")));
  };
  if (model_config == nullptr) refuse("there is none beside the weights");
  if (!model_config->is_object()) refuse(fmt::format("it is {}, not an object", to_string(model_config->type())));

  const std::vector<Hint> hints = hints_of(model_config->as_object());
  if (hints.empty()) refuse("it has neither \"model_type\" nor \"architectures\"");
  const Hint* chosen = nullptr;
  for (const Hint& hint : hints) {
    if (hint.plan.empty()) continue;
    if (chosen != nullptr && chosen->plan != hint.plan)
      refuse(fmt::format("{} stands for the plan {}, {} for the plan {}", chosen->words, chosen->plan, hint.words,
                         hint.plan));
    if (chosen == nullptr) chosen = &hint;
  }
  if (chosen != nullptr) return chosen->plan;

  std::vector<std::string_view> said;
  for (const Hint& hint : hints) said.push_back(hint.words);
  std::vector<std::string_view> known;
  for (const KnownModel& model : known_models()) known.push_back(model.type);
  refuse(fmt::format("it has {}, and the models that are known are {}", fmt::join(said, ", "), fmt::join(known, ", ")));
  return {};
}

}  // namespace

const BuiltinPlan* find_builtin_plan(std::string_view name) {
  const auto found = std::ranges::find(builtin_plans(), name, &BuiltinPlan::name);
  return found == builtin_plans().end() ? nullptr : &*found;
}

bool is_builtin_rule(const MergeRule& rule) {
  static const std::set<std::string> patterns = [] {
    std::set<std::string> all;
    for (const BuiltinPlan& plan : builtin_plans()) {
      const Config json = parse_json(plan.json);
      for (const Config& item : json.at("rules").as_array()) all.insert(item.at("match").as_string());
    }
    return all;
  }();
  return patterns.contains(rule.pattern.text());
}

std::span<const std::string_view> MergePlan::builtin_names() noexcept {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const BuiltinPlan& plan : builtin_plans()) all.push_back(plan.name);
    return all;
  }();
  return names;
}

MergePlan MergePlan::parse(std::string_view json, std::string name, const Config* model_config) {
  MergePlan plan;
  try {
    PlanContent content = parse_plan(json);
    plan.text_ = std::move(content.text);
    plan.rules_ = std::move(content.rules);
    plan.layers_ = std::move(content.layers);
    plan.experts_ = std::move(content.experts);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("plan {}", in_quotes(name)));
  }
  plan.name_ = std::move(name);
  if (model_config != nullptr) plan.model_config_ = *model_config;
  return plan;
}

MergePlan MergePlan::load(const std::string& name_or_file, const Config* model_config) {
  const std::string name = name_or_file == "auto" ? plan_for_model(model_config) : name_or_file;
  if (const BuiltinPlan* builtin = find_builtin_plan(name)) return parse(builtin->json, name, model_config);

  std::error_code error;
  if (!std::filesystem::exists(name_or_file, error)) {
    throw Error(ErrorKind::not_found,
                fmt::format("no plan {}: it is no file, and the built-in plans are {} and auto",
                            in_quotes(name_or_file), fmt::join(builtin_names(), ", ")),
                {.path = name_or_file});
  }
  return parse(read_plan_file(name_or_file), name_or_file, model_config);
}

const MergeRule* MergePlan::find(std::string_view tensor) const {
  const auto rule = std::ranges::find_if(rules_, [&](const MergeRule& r) { return r.pattern.matches(tensor); });
  return rule == rules_.end() ? nullptr : &*rule;
}

std::string MergePlan::renamed(const MergeRule& rule, std::string_view tensor) {
  if (!rule.rename) return std::string(tensor);
  const auto captures = rule.pattern.captures(tensor);
  if (!captures) {
    throw Error(ErrorKind::argument, fmt::format("rule {} renames, but its pattern {} does not fit the tensor {}",
                                                 rule.number, in_quotes(rule.pattern.text()), in_quotes(tensor)));
  }
  return rule.rename->apply(*captures);
}

std::optional<MergePlan::Origin> MergePlan::origin(std::string_view result) const {
  for (const MergeRule& rule : rules_) {
    if (std::holds_alternative<DropAction>(rule.action)) continue;
    std::string name(result);
    if (rule.rename) {
      if (!rule.rename->fits(result)) continue;
      try {
        name = rule.rename->old_name(result);
      } catch (const Error& error) {
        throw error.with_context(
            fmt::format("plan {}: rule {} gives the tensor {} its name, and cannot be turned around", in_quotes(name_),
                        rule.number, in_quotes(result)));
      }
    } else if (!rule.pattern.matches(result)) {
      continue;
    }
    // What comes out is only believed if it gives the same name forwards, by the same rule.
    if (find(name) == &rule && renamed(rule, name) == result) return Origin{std::move(name), &rule};
  }
  return std::nullopt;
}

}  // namespace muster

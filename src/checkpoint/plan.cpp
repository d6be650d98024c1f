// SPDX-License-Identifier: Apache-2.0
// Plans as JSON text: {"muster_plan": 1, "rules": [{"match": GLOB | "regex": REGEX, "action": NAME, ...}, ...]}.
// Keys that nobody knows are errors: a misspelt one would otherwise change what is written without a word.

#include "muster/plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <system_error>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/plan_builtin.hpp"
#include "src/checkpoint/quoted.hpp"

namespace muster {
namespace {

constexpr std::uintmax_t largest_file = 4 << 20;
constexpr std::size_t most_rules = 10'000;
constexpr std::int64_t most_dimensions = 64;

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

void check_keys(const ConfigObject& object, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      refuse(fmt::format("unknown key {} (known: {})", in_quotes(key), fmt::join(known, ", ")));
    }
  }
}

const std::string& string_member(const Config& value, std::string_view key) {
  if (!value.is_string()) refuse(fmt::format("\"{}\" is {}, not a string", key, to_string(value.type())));
  return value.as_string();
}

TensorPattern parse_pattern(const ConfigObject& rule) {
  const Config* glob = rule.find("match");
  const Config* regex = rule.find("regex");
  if ((glob == nullptr) == (regex == nullptr)) {
    refuse("it needs either \"match\" (a glob) or \"regex\"");
  }
  return glob != nullptr ? TensorPattern::glob(string_member(*glob, "match"))
                         : TensorPattern::regex(string_member(*regex, "regex"));
}

MergeAction parse_concat(const ConfigObject& rule) {
  check_keys(rule, {"match", "regex", "action", "comment", "dim"});
  const Config* dim = rule.find("dim");
  if (dim == nullptr) refuse("\"concat\" needs \"dim\", the dimension that the ranks' pieces are joined along");
  if (dim->type() != Config::Type::integer || dim->as_int() < -most_dimensions || dim->as_int() >= most_dimensions) {
    refuse(fmt::format("\"dim\" is not an integer from {} to {}", -most_dimensions, most_dimensions - 1));
  }
  return ConcatRule{dim->as_int()};
}

template <class Rule>
MergeAction parse_plain(const ConfigObject& rule) {
  check_keys(rule, {"match", "regex", "action", "comment"});
  return Rule{};
}

struct ActionReader {
  std::string_view name;
  MergeAction (*read)(const ConfigObject&);
};
constexpr std::array action_readers = {
    ActionReader{"concat", parse_concat},
    ActionReader{"same", parse_plain<SameRule>},
    ActionReader{"first", parse_plain<FirstRule>},
};

MergeRule parse_rule(const Config& value) {
  if (!value.is_object()) refuse(fmt::format("it is {}, not an object", to_string(value.type())));
  const ConfigObject& rule = value.as_object();
  const Config* action = rule.find("action");
  if (action == nullptr) refuse("it has no \"action\"");
  const std::string& name = string_member(*action, "action");
  const auto* reader =
      std::find_if(action_readers.begin(), action_readers.end(), [&](const ActionReader& r) { return r.name == name; });
  if (reader == action_readers.end()) {
    std::vector<std::string_view> names;
    names.reserve(action_readers.size());
    for (const ActionReader& known : action_readers) names.push_back(known.name);
    refuse(fmt::format("unknown action {} (known: {})", in_quotes(name), fmt::join(names, ", ")));
  }
  MergeAction read = reader->read(rule);
  return {parse_pattern(rule), read};
}

std::vector<MergeRule> parse_rules(std::string_view json) {
  const Config plan = parse_json(json);
  if (!plan.is_object()) refuse(fmt::format("a plan is a JSON object, this is {}", to_string(plan.type())));
  check_keys(plan.as_object(), {"muster_plan", "comment", "rules"});
  const Config* version = plan.as_object().find("muster_plan");
  if (version == nullptr) refuse("it has no \"muster_plan\": 1, so it is no merge plan");
  if (version->type() != Config::Type::integer || version->as_int() != 1) {
    throw Error(ErrorKind::version, "\"muster_plan\" is not 1, the only version that this program knows");
  }
  const Config* list = plan.as_object().find("rules");
  if (list == nullptr || !list->is_array() || list->size() == 0)
    refuse("\"rules\" is not a list with at least one rule");
  if (list->size() > most_rules) refuse(fmt::format("{} rules; at most {} are read", list->size(), most_rules));

  std::vector<MergeRule> rules;
  rules.reserve(list->size());
  for (const Config& item : list->as_array()) {
    try {
      rules.push_back(parse_rule(item));
    } catch (const Error& error) {
      throw Error(ErrorKind::corrupt, fmt::format("rule {}: {}", rules.size() + 1, error.what()));
    }
  }
  return rules;
}

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

}  // namespace

std::string_view action_name(const MergeAction& action) noexcept {
  return action_readers[action.index()].name;
}

MergePlan MergePlan::parse(std::string_view json, std::string name) {
  MergePlan plan;
  try {
    plan.rules_ = parse_rules(json);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("plan {}", in_quotes(name)));
  }
  plan.name_ = std::move(name);
  return plan;
}

MergePlan MergePlan::load(const std::string& name_or_file) {
  for (const BuiltinPlan& builtin : builtin_plans()) {
    if (builtin.name == name_or_file) return parse(builtin.json, name_or_file);
  }
  std::error_code error;
  if (!std::filesystem::exists(name_or_file, error)) {
    throw Error(ErrorKind::not_found,
                fmt::format("no plan {}: it is no file, and the built-in plans are {}", in_quotes(name_or_file),
                            fmt::join(builtin_names(), ", ")),
                {.path = name_or_file});
  }
  return parse(read_plan_file(name_or_file), name_or_file);
}

std::span<const std::string_view> MergePlan::builtin_names() noexcept {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const BuiltinPlan& builtin : builtin_plans()) all.push_back(builtin.name);
    return all;
  }();
  return names;
}

const MergeRule* MergePlan::find(std::string_view tensor) const {
  const auto rule =
      std::find_if(rules_.begin(), rules_.end(), [&](const MergeRule& r) { return r.pattern.matches(tensor); });
  return rule == rules_.end() ? nullptr : &*rule;
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
// Plans by name: built in, for the model at hand, or from a file.

#include "muster/plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "muster/error.hpp"
#include "src/checkpoint/plan_auto.hpp"
#include "src/checkpoint/plan_builtin.hpp"
#include "src/checkpoint/plan_json.hpp"
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

}  // namespace

MergePlan MergePlan::parse(std::string_view json, std::string name, const Config* model_config) {
  MergePlan plan;
  try {
    PlanContent content = parse_plan(json);
    plan.rules_ = std::move(content.rules);
    plan.layers_ = std::move(content.layers);
    plan.experts_ = std::move(content.experts);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("plan {}", in_quotes(name)));
  }
  plan.name_ = std::move(name);
  plan.text_ = json;
  if (model_config != nullptr) plan.model_config_ = *model_config;
  return plan;
}

MergePlan MergePlan::load(const std::string& name_or_file, const Config* model_config) {
  const std::string name(name_or_file == "auto" ? plan_for_model(model_config) : name_or_file);
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
  const auto rule =
      std::find_if(rules_.begin(), rules_.end(), [&](const MergeRule& r) { return r.pattern.matches(tensor); });
  return rule == rules_.end() ? nullptr : &*rule;
}

}  // namespace muster

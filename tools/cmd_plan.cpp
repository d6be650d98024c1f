// SPDX-License-Identifier: Apache-2.0
// muster plan: prints a merge plan, or tries it on a model.

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/base_model.hpp"
#include "src/checkpoint/assembly/export_job.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"
#include "src/checkpoint/plan/plan_suggest.hpp"
#include "src/checkpoint/plan/plan_views.hpp"
#include "src/inspect/output.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

/// The limit of problems for a human reader: a wrong rule causes one per tensor.
constexpr std::size_t most_problems = 20;

struct PlanArguments {
  std::string plan;
  Request request;
  TensorFilter filter;
  std::string order;
  bool json = false;
  inspect::OutputStyle style = output_style();
};

/// The result of applying a plan to a model in reverse, as muster shard does.
struct Trial {
  struct Taken {
    NamedSpec tensor;
    std::string origin;  ///< the ranks' name of it
    const MergeRule* rule = nullptr;
  };
  std::vector<Taken> taken;
  std::vector<const MergeRule*> unused;  ///< the plan's own rules that match no tensor
  std::vector<std::string> problems;
};

/// Reports a problem of a rule once, because it is the same for the tensors of all layers.
template <class Step>
void attempt(Trial& trial, const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    if (std::ranges::find(trial.problems, error.what()) == trial.problems.end())
      trial.problems.emplace_back(error.what());
  }
}

Trial try_plan(MergePlan& plan, const TensorSource& model, const TensorSelection& selection) {
  std::vector<NamedSpec> all;
  for (const TensorEntry& entry : model.tensors()) all.push_back({entry.name, {entry.dtype, entry.shape}});
  fit_to(plan, all);
  Trial trial;
  std::vector<NamedSpec> specs;
  std::set<std::size_t> used;
  std::vector<std::string> unmatched;
  for (const TensorEntry& entry : model.tensors()) {
    const NamedSpec& tensor = specs.emplace_back(NamedSpec{entry.name, {entry.dtype, entry.shape}});
    attempt(trial, [&] {
      const std::optional<MergePlan::Origin> origin = plan.origin(tensor.name);
      if (origin) used.insert(origin->rule->number);
      if (!selection.has(tensor.name)) return;
      if (!origin) return unmatched.push_back(tensor.name);
      trial.taken.push_back({tensor, origin->name, origin->rule});
      (void)plan.resolve(*origin->rule, origin->name, std::span(&tensor.spec, 1), true);
    });
  }
  if (!unmatched.empty()) trial.problems.push_back(no_rule_words(plan, unmatched));
  for (const MergeRule& rule : plan.rules())
    // In reverse, rules that drop tensors have no result.
    if (!is_builtin_rule(rule) && !is_left_out(rule) && used.insert(rule.number).second) trial.unused.push_back(&rule);
  attempt(trial, [&] { check_against_config(plan, specs); });
  if (!plan.views().empty())
    attempt(trial, [&] {
      std::vector<NamedSpec> wholes;
      for (const Trial::Taken& taken : trial.taken) wholes.push_back({taken.origin, taken.tensor.spec});
      unview_rank(plan, {}, wholes);
    });
  return trial;
}

/// Applies the plan to the tensors of ranks, as an export does.
Trial try_on_ranks(const MergePlan& plan, const ShardSet& shards, const Request& request) {
  Trial trial;
  attempt(trial, [&] {
    const ExportManifest account = plan_job(request, shards, shards.listings()).account;
    std::set<std::size_t> used;
    for (const TensorMapping& tensor : account.tensors) {
      const MergeRule& rule = plan.rules().at(tensor.rule - 1);
      used.insert(rule.number);
      trial.taken.push_back({{tensor.name, tensor.spec}, tensor.origin, &rule});
    }
    for (const TensorMapping& tensor : account.dropped) used.insert(tensor.rule);
    for (const MergeRule& rule : plan.rules())
      if (!used.contains(rule.number) && !is_builtin_rule(rule)) trial.unused.push_back(&rule);
  });
  return trial;
}

/// Removes the tensors that the options do not select, and sorts the others.
void narrow(Trial& trial, const TensorSelection& selection, const PlanArguments& arguments) {
  std::erase_if(trial.taken, [&](const Trial::Taken& taken) { return !selection.has(taken.tensor.name); });
  if (trial.taken.empty() && trial.problems.empty() && !selection.is_all())
    refuse_selection({.select = arguments.filter.select, .exclude = arguments.filter.exclude});
  const auto bytes_of = [](const Trial::Taken& taken) {
    return byte_size(taken.tensor.spec.dtype, taken.tensor.spec.shape);
  };
  std::erase_if(trial.taken, [&](const Trial::Taken& taken) {
    return !has_selected_type(arguments.filter, taken.tensor.spec.dtype, bytes_of(taken));
  });
  if (arguments.order == "name")
    std::ranges::stable_sort(trial.taken, natural_less,
                             [](const Trial::Taken& taken) -> std::string_view { return taken.tensor.name; });
  if (arguments.order == "size") std::ranges::stable_sort(trial.taken, std::greater(), bytes_of);
  if (arguments.order == "rule")
    std::ranges::stable_sort(trial.taken, {}, [](const Trial::Taken& taken) { return taken.rule->number; });
}

std::string trial_text(const Trial& trial, const inspect::OutputStyle& style) {
  inspect::TextTable table({{"TENSOR"}, {"RULE"}, {"PATTERN"}, {"IS"}}, {0, 2});
  for (const Trial::Taken& taken : trial.taken) {
    std::string name = inspect::printable(taken.tensor.name);
    if (taken.origin != taken.tensor.name) name += " (" + inspect::printable(taken.origin) + ")";
    table.add({name, fmt::format("{} {}", taken.rule->number, action_name(taken.rule->action)),
               inspect::printable(taken.rule->pattern.text()), to_string(taken.tensor.spec)});
  }
  std::string text;
  if (!table.empty()) table.append_to(text, style);
  for (const MergeRule* rule : trial.unused)
    text += fmt::format("note: rule {} ({}) matches no tensor\n", rule->number, in_quotes(rule->pattern.text()));
  const std::size_t shown = std::min(trial.problems.size(), most_problems);
  for (const std::string& problem : std::span(trial.problems).first(shown))
    text += fmt::format("problem: {}\n", problem);
  if (shown < trial.problems.size())
    text += fmt::format("problem: {} more; --json lists them all\n", trial.problems.size() - shown);
  return text;
}

Config trial_tree(const MergePlan& plan, const Trial& trial) {
  const auto taken_tree = [](const Trial::Taken& taken) {
    return Config::object({{"name", taken.tensor.name},
                           {"origin", taken.origin},
                           {"rule", taken.rule->number},
                           {"action", action_name(taken.rule->action)}});
  };
  const auto number = [](const MergeRule* rule) { return rule->number; };
  return Config::object({{"plan", plan.name()},
                         {"tensors", inspect::list_of(trial.taken, taken_tree)},
                         {"unused_rules", inspect::list_of(trial.unused, number)},
                         {"problems", ConfigArray(trial.problems.begin(), trial.problems.end())}});
}

int suggest(const PlanArguments& arguments) {
  const Request& request = arguments.request;
  const ShardSet shards(request.path, 0, 1, request.states, request.thirdparty);
  std::vector<std::string> notes;
  const std::optional<Config> config = shards.facts(request, notes).config;
  // For ranks, the first one represents all: names suffice to choose the plan, and parts have as many dimensions as the
  // whole.
  const bool is_foreign = contents_of(request.path, request.thirdparty).foreign.has_value();
  const SuggestedPlan suggested =
      suggest_plan(shards.listings().front().tensors, config ? &*config : nullptr, is_foreign);
  if (arguments.json) {
    print(inspect::json_report(
        Config::object({{"plan", parse_json(suggested.text)},
                        {"notes", ConfigArray(notes.begin(), notes.end())},
                        {"uncertain", ConfigArray(suggested.unsure.begin(), suggested.unsure.end())}})));
    return 0;
  }
  print(suggested.text);
  for (const std::string& note : notes) remark(note);
  for (const std::string& doubt : suggested.unsure) remark("uncertain: " + doubt);
  return 0;
}

int show(const PlanArguments& arguments) {
  const std::string text = MergePlan::load(arguments.plan).text();
  print(arguments.json ? inspect::json_report(parse_json(text)) : text);
  return 0;
}

int check(const PlanArguments& arguments) {
  Request request = arguments.request;
  request.looks_only = true;
  const bool has_ranks = contents_of(request.path, request.thirdparty).has_ranks();
  const ShardSet shards(request.path, 0, 1, request.states, request.thirdparty);
  std::vector<std::string> notes;
  const std::optional<Config> config = shards.facts(request, notes).config;
  MergePlan plan = MergePlan::load(arguments.plan, config ? &*config : nullptr);
  const TensorSelection selection({.select = arguments.filter.select, .exclude = arguments.filter.exclude});
  if (has_ranks) {
    request.plan = arguments.plan;
    (void)layout_of(shards.listings(), request.source_layout);  // a wrong layout is not a problem of the plan
  }
  Trial trial = has_ranks ? try_on_ranks(plan, shards, request) : try_plan(plan, shards, selection);
  narrow(trial, selection, arguments);
  print(arguments.json ? inspect::json_report(trial_tree(plan, trial)) : trial_text(trial, arguments.style));
  return trial.problems.empty() ? 0 : 1;
}

void add_show_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("show", "Print a plan");
  auto arguments = std::make_shared<PlanArguments>();
  command->add_option("plan", arguments->plan, "A built-in plan or a JSON file")->required()->type_name(plan_type);
  add_json_flag(*command, arguments->json)->description("Print JSON without the line breaks of the file");
  command->footer("Example:\n  muster plan show llama > my_plan.json");
  command->callback([arguments] { show(*arguments); });
}

void add_check_plan_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("check", "Apply a plan to a model, and report problems");
  auto arguments = std::make_shared<PlanArguments>();
  command->add_option("plan", arguments->plan, "A built-in plan, a JSON file, or auto (chosen by config.json)")
      ->required()
      ->type_name(plan_type);
  command->add_option("source", arguments->request.path, "A model, shards, a workspace or a third-party checkpoint")
      ->required()
      ->type_name("SOURCE");
  add_filter_options(*command, arguments->filter);
  add_sort_option(*command, arguments->order, {"file", "name", "size", "rule"},
                  "Order of the list; size: largest first");
  add_checkpoint_options(*command, arguments->request);
  add_style_options(*command, arguments->style);
  add_json_flag(*command, arguments->json);
  command->footer(
      "Lists the rule that applies to each tensor, the rules of a plan file that match no tensor, tensors without a\n"
      "rule, and sizes that contradict config.json. Writes nothing. For a model, only the selected tensors are\n"
      "checked. Ranks are checked as a whole, and --select and --exclude shorten the list.\n"
      "Exit status: 0 no problem found; 1 problems found; 2 the plan or the source cannot be read.\n\n"
      "Examples:\n  muster plan check my_plan.json model/\n"
      "  muster plan check auto model/ --json | jq -r '.problems[]'");
  command->callback([arguments, &status] { status = check(*arguments); });
}

void add_suggest_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("suggest", "Propose a plan for a model");
  auto arguments = std::make_shared<PlanArguments>();
  command->add_option("source", arguments->request.path, "A model, shards, a workspace or a third-party checkpoint")
      ->required()
      ->type_name("SOURCE");
  add_checkpoint_options(*command, arguments->request);
  add_json_flag(*command, arguments->json);
  command->footer(
      "The proposal is based on names and shapes only. Review it before use.\n\n"
      "Example:\n  muster plan suggest model/ > my_plan.json");
  command->callback([arguments] { suggest(*arguments); });
}

}  // namespace

void add_plan_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("plan", "Print a merge plan, check it with a model, or propose one");
  command->require_subcommand(1);
  add_show_plan_command(*command);
  add_check_plan_command(*command, status);
  add_suggest_plan_command(*command);
}

}  // namespace muster::tools

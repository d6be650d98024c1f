// SPDX-License-Identifier: Apache-2.0
// muster ls: lists the contents of a workspace, or the names in a file.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/source.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ListArguments {
  std::string path;
  SourceOptions source;
  TensorFilter filter;
  std::string order;
  bool names_only = false;
  bool json = false;
};

/// A directory without a model, shards or a third-party checkpoint is treated as a workspace. The error message then
/// describes the missing parts of a workspace.
bool is_for_survey(const ListArguments& arguments) {
  std::error_code error;
  if (!std::filesystem::is_directory(arguments.path, error)) return false;
  const PathContents::Kind kind = contents_of(arguments.path, arguments.source.thirdparty).kind;
  return kind == PathContents::Kind::workspace || kind == PathContents::Kind::other;
}

/// Sorts the states of each job, and the other files.
void sort_survey(workspace::Survey& survey, std::string_view order) {
  const auto sort = [&](auto& items, const auto& entry_of) {
    if (order == "size")
      std::ranges::stable_sort(items, std::greater(), [&](const auto& item) { return entry_of(item).bytes; });
    if (order == "age")
      std::ranges::stable_sort(items, std::less(), [&](const auto& item) { return entry_of(item).changed; });
    if (order == "name" || order == "file")
      std::ranges::stable_sort(items, natural_less,
                               [&](const auto& item) -> std::string_view { return entry_of(item).file; });
  };
  const auto of_state = [](const workspace::SurveyState& state) -> const workspace::SurveyEntry& {
    return state.entry;
  };
  for (workspace::SurveyJob& job : survey.jobs) {
    sort(job.states, of_state);
    sort(job.kept, of_state);
    sort(job.passing, std::identity());
  }
  sort(survey.temporary, std::identity());
  sort(survey.foreign, std::identity());
}

/// Lists a workspace: its jobs, states and files.
void list_workspace(const ListArguments& arguments) {
  workspace::Survey survey = workspace::survey(arguments.path, {.open_states = !arguments.names_only});
  sort_survey(survey, arguments.order);
  const auto now = std::chrono::system_clock::now();
  print(arguments.json ? inspect::json_report(inspect::survey_tree(survey, now))
                       : inspect::survey_text(survey, now, output_style()));
}

/// Lists the names of tensors. On a terminal they are sorted, with numbers by their value. Scripts get the order of the
/// file.
void list_names(const ListArguments& arguments) {
  if (arguments.order == "rank" || arguments.order == "age")
    throw Error(ErrorKind::invalid_argument,
                fmt::format("--sort {} is only valid for a workspace (expected name, size, file)", arguments.order));
  const Source source = open_source(arguments.path, arguments.source);
  std::vector<std::size_t> places = matching(source, arguments.filter);
  const std::vector<TensorEntry>& entries = source.entries();
  const auto name_of = [&](std::size_t place) -> std::string_view { return entries[place].name; };
  if (arguments.order == "name" || (arguments.order.empty() && output_style().width != 0 && !arguments.json))
    std::ranges::sort(places, natural_less, name_of);
  if (arguments.order == "size")
    std::ranges::stable_sort(places, std::greater(), [&](std::size_t place) { return entries[place].bytes; });
  std::vector<std::string> names;
  for (const std::size_t place : places) names.push_back(entries[place].name);
  if (arguments.json)
    return print(inspect::json_report(Config::object({{"path", source.path},
                                                      {"kind", source.kind},
                                                      {"names", ConfigArray(names.begin(), names.end())},
                                                      {"not_readable", count_lost(source.tensors->omissions())}})));
  std::string out;
  for (const std::string& name : names) out += inspect::printable(name) + "\n";
  print(out);
  // A note must not be on standard output, because scripts read each of its lines as a name.
  if (const std::string line = omissions_line(source); !line.empty()) remark(line.substr(0, line.size() - 1));
}

}  // namespace

void add_ls_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("ls", "List a workspace (jobs, ranks, steps) or the tensor names in a file");
  auto arguments = std::make_shared<ListArguments>();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  add_filter_options(*command, arguments->filter);
  add_sort_option(*command, arguments->order, {"name", "size", "file", "rank", "age"},
                  "Order of the list; size, age: largest first [rank in a workspace, name on a terminal, else file]",
                  false);
  command->add_option("--plan", arguments->source.plan, plan_help)->type_name(plan_type);
  add_checkpoint_options(*command, arguments->source);
  command->add_flag("--names-only", arguments->names_only,
                    "Workspace: list file names without opening them (completeness is not checked)");
  add_json_flag(*command, arguments->json);
  command->footer(
      "A state is complete if its commit mark is valid and its header agrees with its name. muster verify reads all\n"
      "of it.\n\n"
      "Examples:\n  muster ls /shared/workspace\n  muster ls workspace/ --json | jq '.jobs[].common_step'\n"
      "  muster ls model/ --select '*norm*'");
  command->callback([arguments] { is_for_survey(*arguments) ? list_workspace(*arguments) : list_names(*arguments); });
}

}  // namespace muster::tools

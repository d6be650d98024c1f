// SPDX-License-Identifier: Apache-2.0
// muster ls: lists the contents of a workspace, or the names in a file.

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/source.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ListArguments {
  std::string path;
  inspect::SourceOptions source;
  bool names_only = false;
  bool json = false;
};

/// A directory without a model, shards or a foreign checkpoint is treated as a workspace. The error message then
/// describes the missing parts of a workspace.
bool is_for_survey(const ListArguments& arguments) {
  std::error_code error;
  if (!std::filesystem::is_directory(arguments.path, error)) return false;
  const Contents::Kind kind = contents_of(arguments.path, arguments.source.foreign).kind;
  return kind == Contents::Kind::workspace || kind == Contents::Kind::other;
}

/// Lists a workspace: its jobs, states and files.
void list_workspace(const ListArguments& arguments) {
  const workspace::Survey survey = workspace::survey(arguments.path, {.open_states = !arguments.names_only});
  const auto now = std::chrono::system_clock::now();
  print(arguments.json ? inspect::json_report(inspect::survey_tree(survey, now))
                       : inspect::survey_text(survey, now, output_style()));
}

/// Lists the tensors' names. For people they are sorted, with numbers by their value; scripts get the order of the
/// file, and sort as they like.
void list_names(const ListArguments& arguments) {
  const inspect::Source source = inspect::open_source(arguments.path, arguments.source);
  std::vector<std::string> names;
  for (const TensorEntry& entry : source.entries()) names.push_back(entry.name);
  if (arguments.json)
    return print(inspect::json_report(Config::object({{"path", source.path},
                                                      {"kind", source.kind},
                                                      {"names", ConfigArray(names.begin(), names.end())},
                                                      {"not_readable", count_lost(source.tensors->omissions())}})));
  if (output_style().width != 0) std::ranges::sort(names, natural_less);
  std::string out;
  for (const std::string& name : names) out += inspect::printable(name) + "\n";
  print(out);
  // A note must not be on standard output, because scripts read each of its lines as a name.
  if (const std::string line = inspect::omissions_line(source); !line.empty())
    complain(line.substr(0, line.size() - 1));
}

}  // namespace

void add_ls_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("ls", "What is in a workspace: jobs, ranks, generations; or names in a file");
  auto arguments = std::make_shared<ListArguments>();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  command->add_option("--plan", arguments->source.plan, plan_help)->type_name(plan_type);
  add_checkpoint_options(*command, arguments->source);
  command->add_flag("--names-only", arguments->names_only,
                    "Of a workspace: do not look into states; complete is then what has its name");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "A state is complete when its file says so and what it says of itself is right (muster verify reads all of it).\n"
      "Of anything but a workspace, the tensors' names are listed (muster show has more).\n\n"
      "Examples:\n  muster ls /shared/workspace\n  muster ls workspace/ --json | jq '.jobs[].common_generation'\n"
      "  muster ls model.safetensors | grep norm");
  command->callback([arguments] { is_for_survey(*arguments) ? list_workspace(*arguments) : list_names(*arguments); });
}

}  // namespace muster::tools

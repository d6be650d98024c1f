// SPDX-License-Identifier: Apache-2.0
// muster gc: deletes files of a workspace that no process can need.

#include <algorithm>
#include <memory>
#include <string>

#include "src/inspect/reports.hpp"
#include "src/workspace/gc.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct GcArguments {
  std::string path;
  std::string older_than;
  bool yes = false;
  bool json = false;
};

int collect(const GcArguments& arguments) {
  workspace::GcOptions options;
  options.dry_run = !arguments.yes;
  if (!arguments.older_than.empty()) options.older_than = inspect::parse_age(arguments.older_than);
  const workspace::GcReport report = workspace::collect_garbage(arguments.path, options);
  const std::string words = arguments.json ? inspect::json_report(inspect::gc_tree(report, options.dry_run))
                                           : inspect::gc_text(report, options.dry_run, output_style());
  const bool failed = std::any_of(report.items.begin(), report.items.end(), [](const workspace::GcItem& item) {
    return item.verdict == workspace::GcVerdict::failed;
  });
  options.dry_run || failed ? print(words) : print_done(words);
  return failed ? 1 : 0;
}

}  // namespace

void add_gc_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("gc", "Remove from a workspace what nobody can need any more");
  auto arguments = std::make_shared<GcArguments>();
  command->add_option("workspace", arguments->path, "The workspace")->required()->type_name("WORKSPACE");
  command->add_flag("--yes", arguments->yes, "Remove; without it, only show what would go");
  command->add_option("--older-than", arguments->older_than, "Also states and what other hosts left: 12h, 2d, 1w")
      ->type_name("AGE");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "Without an age only files go whose writers are proved dead: processes of this host that are not there any "
      "more.\n"
      "Exit status: 0, 1 if something could not be removed, 2 if it is no workspace, 3 if it is done but not said.\n\n"
      "Examples:\n  muster gc /shared/workspace\n  muster gc /shared/workspace --older-than 2d --yes");
  command->callback([arguments, &status] { status = collect(*arguments); });
}

}  // namespace muster::tools

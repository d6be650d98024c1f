// SPDX-License-Identifier: Apache-2.0
// muster gc: deletes files of a workspace, or of a directory with versions of weights, that no process can need.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "src/inspect/reports.hpp"
#include "src/versions/unfinished.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/survey.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct GcArguments {
  std::string path;
  std::string order;
  workspace::GcOptions options;
  bool yes = false;
  bool json = false;
};

int collect(const GcArguments& arguments) {
  using workspace::GcItem;
  workspace::GcOptions options = arguments.options;
  options.dry_run = !arguments.yes;
  const bool has_versions =
      !workspace::is_workspace_directory(arguments.path) && versions::is_version_directory(arguments.path);
  workspace::GcReport report = has_versions ? versions::collect_unfinished(arguments.path, options)
                                            : workspace::collect_garbage(arguments.path, options);
  if (arguments.order == "size") std::ranges::stable_sort(report.items, std::greater(), &GcItem::bytes);
  if (arguments.order == "age") std::ranges::stable_sort(report.items, std::greater(), &GcItem::age);
  const std::string text = arguments.json ? inspect::json_report(inspect::gc_tree(report, options.dry_run))
                                          : inspect::gc_text(report, options.dry_run, output_style());
  const bool failed = std::ranges::any_of(
      report.items, [](const GcItem& item) { return item.verdict == workspace::GcVerdict::failed; });
  options.dry_run || failed ? print(text) : print_done(text);
  return failed ? 1 : 0;
}

}  // namespace

void add_gc_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("gc", "Delete abandoned files from a workspace or from versions (dry run by default)");
  auto arguments = std::make_shared<GcArguments>();
  command->add_option("workspace", arguments->path, "A workspace, or a directory with versions of weights")
      ->required()
      ->type_name("WORKSPACE");
  command->add_flag("--yes", arguments->yes, "Delete the files; otherwise they are only listed");
  add_stale_option(*command, arguments->options.older_than,
                   "Also delete states, and leftovers of other hosts, that are older: 12h, 2d, 1w");
  add_sort_option(*command, arguments->order, {"name", "size", "age"},
                  "Order of the list; size and age: largest first");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Without --stale-after it deletes only files of processes that ran on this host and have ended.\n"
      "In a directory of versions it deletes only versions that their publisher has not completed.\n"
      "Exit status: 0 success; 1 some files could not be deleted; 2 not a workspace or versions; 3 success, but the\n"
      "report could not be printed.\n\n"
      "Examples:\n  muster gc /shared/workspace\n  muster gc /shared/workspace --stale-after 2d --yes");
  command->callback([arguments, &status] { status = collect(*arguments); });
}

}  // namespace muster::tools

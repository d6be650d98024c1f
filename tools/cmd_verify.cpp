// SPDX-License-Identifier: Apache-2.0
// muster verify: checks that a checkpoint, shards or a file are complete, and writes checksums for later checks.

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/verify.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct VerifyArguments {
  std::vector<std::string> paths;
  bool headers_only = false;
  bool write_checksums = false;
  bool json = false;
  VerifyOptions options;
};

int write_all_checksums(const VerifyArguments& arguments) {
  std::string words;
  for (const std::string& path : arguments.paths)
    words += fmt::format("{} written\n", inspect::counted(write_checksums(path, progress_bar()), "checksum"));
  print_done(words);
  return 0;
}

int verify_all(const VerifyArguments& arguments) {
  int status = 0;
  ConfigArray reports;
  for (const std::string& path : arguments.paths) {
    std::optional<VerifyReport> report;
    try {
      VerifyOptions options = arguments.options;
      options.checksums = !arguments.headers_only;
      options.progress = progress_bar();
      report = verify(path, options);
    } catch (const Error& error) {
      // The other paths can still be verified.
      if (arguments.paths.size() == 1) throw;
      status = complain(error.what());
      continue;
    }
    if (!report->is_good()) status = std::max(status, 1);
    reports.push_back(inspect::verify_tree(*report));
    if (arguments.json) continue;
    if (arguments.paths.size() > 1) print(inspect::printable(path) + "\n");
    print(inspect::verify_text(*report));
  }
  if (arguments.json)
    print(inspect::json_report(arguments.paths.size() == 1 ? reports.front() : Config::object({{"reports", reports}})));
  return status;
}

}  // namespace

void add_verify_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("verify", "Find all that is wrong with files, checkpoints, shards or workspaces");
  auto arguments = std::make_shared<VerifyArguments>();
  command->add_option("paths", arguments->paths, "Files, models' directories, workspaces, directories with shards")
      ->required()
      ->type_name(source_type);
  auto* headers =
      command->add_flag("--headers-only", arguments->headers_only, "Do not read tensors for their checksums");
  auto* write = command->add_flag("--write-checksums", arguments->write_checksums,
                                  "Make muster.checksums.json beside a checkpoint that is whole");
  VerifyOptions& options = arguments->options;
  command->add_option("--plan", options.plan, plan_help)->type_name(plan_type);
  command->add_option("--base", options.base_model, "Compare with this model, as an export does")
      ->type_name("MODEL_DIR");
  add_rank_options(*command, options.key, options.file_pattern, options.source_layout);
  add_alone_flag(*command);
  auto* json = command->add_flag("--json", arguments->json, "JSON for programs");
  write->excludes(headers)->excludes(json);
  command->footer(
      "The index against the files, sizes and headers, numbers without holes, and all tensors against their checksums\n"
      "where there are some. Of a workspace: every state, ranks that lack one, and what was left behind. With --plan,\n"
      "--base or --layout it also checks that an export with them would succeed. Exit status:\n"
      "0 good, 1 problems, 2 something cannot be verified.\n\n"
      "Examples:\n  muster verify --write-checksums model/\n  muster verify workspace/ state.h5\n  muster verify "
      "model/ --json | jq -r '.problems[].words'");
  command->callback([arguments, &status] {
    status = arguments->write_checksums ? write_all_checksums(*arguments) : verify_all(*arguments);
  });
}

}  // namespace muster::tools

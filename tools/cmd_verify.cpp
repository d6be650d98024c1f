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
  std::string order;
  bool json = false;
  VerifyOptions options;
};

/// Returns the report of one path; of several paths, an object with their list.
std::string report_json(ConfigArray reports) {
  const bool is_one = reports.size() == 1;
  return inspect::json_report(is_one ? reports.front() : Config::object({{"reports", std::move(reports)}}));
}

int write_all_checksums(const VerifyArguments& arguments) {
  std::string text;
  ConfigArray reports;
  for (const std::string& path : arguments.paths) {
    const std::uint64_t written = write_checksums(path, progress_bar());
    text += fmt::format("{} written\n", counted(written, "checksum"));
    reports.push_back(Config::object({{"path", path}, {"checksums_written", written}}));
  }
  print_done(arguments.json ? report_json(std::move(reports)) : text);
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
    if (arguments.order == "file") std::ranges::stable_sort(report->problems, {}, &VerifyProblem::file);
    if (arguments.order == "defect") std::ranges::stable_sort(report->problems, {}, &VerifyProblem::defect);
    reports.push_back(inspect::verify_tree(*report));
    if (arguments.json) continue;
    if (arguments.paths.size() > 1) print(inspect::printable(path) + "\n");
    print(inspect::verify_text(*report));
  }
  if (arguments.json)
    print(arguments.paths.size() == 1 ? report_json(std::move(reports))
                                      : inspect::json_report(Config::object({{"reports", std::move(reports)}})));
  return status;
}

}  // namespace

void add_verify_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("verify", "Find defects of files, checkpoints, shards and workspaces");
  auto arguments = std::make_shared<VerifyArguments>();
  command->add_option("paths", arguments->paths, "Files, model directories, workspaces, or directories with shards")
      ->required()
      ->type_name("PATH");
  auto* headers = command->add_flag("--headers-only", arguments->headers_only, "Do not compare tensors with checksums");
  auto* write = command->add_flag("--write-checksums", arguments->write_checksums,
                                  "Write muster.checksums.json next to a complete checkpoint");
  VerifyOptions& options = arguments->options;
  add_name_options(*command, options.select, options.exclude);
  command->add_option("--plan", options.plan, plan_help)->type_name(plan_type);
  command->add_option("--base-model", options.base_model, "Compare with this model directory, as muster export does")
      ->type_name("DIR");
  add_rank_options(*command, options.key, options.file_pattern, options.source_layout);
  add_sort_option(*command, arguments->order, {"found", "file", "defect"}, "Order of the problems");
  add_json_flag(*command, arguments->json);
  write->excludes(headers);
  command->footer(
      "Checks the index against the files, headers, sizes, the numbering of files, and all tensors that have "
      "checksums.\n"
      "For a workspace it checks every state, and reports ranks without a state and leftovers. With --plan, "
      "--base-model\n"
      "or --from it also checks that an export with them would succeed. With --select or --exclude, the bytes of "
      "other\n"
      "tensors are not read.\n"
      "Exit status: 0 no problem found; 1 problems found; 2 something cannot be verified.\n\n"
      "Examples:\n  muster verify --write-checksums model/\n  muster verify workspace/ state.h5\n"
      "  muster verify model/ --json | jq -r '.problems[].message'");
  command->callback([arguments, &status] {
    status = arguments->write_checksums ? write_all_checksums(*arguments) : verify_all(*arguments);
  });
}

}  // namespace muster::tools

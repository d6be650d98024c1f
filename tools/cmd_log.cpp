// SPDX-License-Identifier: Apache-2.0
// muster log: lists the versions of weights in a directory, and verifies them.

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>

#include "muster/publish.hpp"
#include "src/inspect/version_reports.hpp"
#include "tools/commands.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct LogArguments {
  std::string source;
  LogOptions options;
  bool json = false;
};

int show_log(const LogArguments& arguments) {
  const VersionLog log = interruptible([&](const std::stop_token& stop) {
    LogOptions options = arguments.options;
    options.stop = stop;
    return read_versions(arguments.source, options);
  });
  const bool verified = arguments.options.verify;
  const auto now = std::chrono::system_clock::now();
  print(arguments.json ? inspect::json_report(inspect::log_tree(log, verified, now))
                       : inspect::log_text(log, verified, now, output_style()));
  return verified && !log.is_sound() ? 1 : 0;
}

}  // namespace

void add_log_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("log", "List the versions of weights in a directory, and verify them");
  auto arguments = std::make_shared<LogArguments>();
  LogOptions& options = arguments->options;
  command->add_option("source", arguments->source, "Directory of the versions")->required()->type_name("SOURCE");
  command
      ->add_option("--base", options.base,
                   "Model directory that is version 0; --verify needs it if version 1 is a delta")
      ->type_name("DIR");
  command->add_option("--local", options.local, "Also report on this local copy of a version")->type_name("LOCAL");
  command->add_flag("--verify", options.verify,
                    "Read all files, apply the deltas in memory, and compare the checksums of all versions");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Without --verify, only indexes and headers are read. CHANGED is the share of changed elements. Versions of "
      "other\n"
      "programs do not record it.\n"
      "Exit status: 0 success; 1 --verify found problems; 2 not a readable directory.\n\n"
      "Examples:\n  muster log /shared/weights\n  muster log /shared/weights --local /tmp/model\n"
      "  muster log /shared/weights --base model/ --verify\n"
      "  muster log /shared/weights --json | jq -r '.versions[-1].version'");
  command->callback([arguments, &status] {
    arguments->options.progress = progress_bar();
    status = show_log(*arguments);
  });
}

}  // namespace muster::tools

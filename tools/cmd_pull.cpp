// SPDX-License-Identifier: Apache-2.0
// muster pull: brings a directory of this host to a version of weights.

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "muster/error.hpp"
#include "muster/publish.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/version_reports.hpp"
#include "src/versions/version_index.hpp"
#include "tools/commands.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

struct PullArguments {
  std::string source;
  std::string local;
  PullOptions options;
  bool json = false;
};

/// Parses "7", "000007" or "newest".
std::optional<std::uint64_t> version_of(const std::string& text) {
  if (text == "newest") return std::nullopt;
  const std::optional<std::uint64_t> version = versions::parse_version_digits(text);
  if (!version)
    throw Error(ErrorKind::invalid_argument,
                "--version " + in_quotes(text) + ": not a version (examples: 7, 000007, newest)");
  return version;
}

void pull(const PullArguments& arguments) {
  const PullReport report = interruptible([&](const std::stop_token& stop) {
    PullOptions options = arguments.options;
    options.stop = stop;
    return pull_version(arguments.source, arguments.local, options);
  });
  print_done(arguments.json ? inspect::json_report(inspect::pull_tree(report, arguments.local))
                            : inspect::pull_text(report, arguments.local));
}

}  // namespace

void add_pull_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("pull", "Bring a directory of this host to a version of weights");
  auto arguments = std::make_shared<PullArguments>();
  PullOptions& options = arguments->options;
  command->add_option("source", arguments->source, "Directory of the versions")->required()->type_name("SOURCE");
  command->add_option("local", arguments->local, "Model directory of this host; created if missing")
      ->required()
      ->type_name("LOCAL");
  command
      ->add_option("--base", options.base,
                   "Model directory that is version 0; not needed if the pull can begin at a full version or at LOCAL")
      ->type_name("DIR");
  command
      ->add_option_function<std::string>(
          "--version", [&options](const std::string& text) { options.version = version_of(text); },
          "The version: a number (0: the base), or newest")
      ->default_str("newest")
      ->type_name("N|newest");
  add_age_option(
      *command, "--wait", [&options](std::chrono::seconds time) { options.wait = time; },
      "How long to wait for the version, and for files that a network file system does not show yet")
      ->default_str("0s");
  add_age_option(
      *command, "--lock-timeout", [&options](std::chrono::seconds time) { options.lock_timeout = time; },
      "How long to wait for another process of this host that pulls to LOCAL")
      ->default_str("30min");
  command
      ->add_option_function<std::string>(
          "--durability",
          [&options](const std::string& word) {
            options.durability = word == "synced" ? PullDurability::synced : PullDurability::boot;
          },
          "boot: LOCAL is usable until the host restarts; synced: after a power failure, too")
      ->check(one_of({"boot", "synced"}))
      ->default_str("boot")
      ->type_name("boot|synced");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Processes of a host may call the command at the same time: one of them pulls, and each other process waits.\n"
      "LOCAL is the old version or the new one at any moment. If the command fails, LOCAL is unchanged.\n"
      "Exit status: 0 LOCAL has the version; 2 it does not; 3 it does, but the report could not be printed.\n\n"
      "Examples:\n  muster pull /shared/weights /tmp/model --base model/\n"
      "  muster pull /shared/weights /tmp/model --base model/ --version 7 --wait 1min\n"
      "  muster pull /shared/weights /tmp/model --base model/ --json | jq .version");
  command->callback([arguments] {
    arguments->options.progress = progress_bar();
    pull(*arguments);
  });
}

}  // namespace muster::tools

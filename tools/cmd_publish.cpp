// SPDX-License-Identifier: Apache-2.0
// muster publish: publishes a model as the next version in a directory, with the ranks of a job or alone.

#include <algorithm>
#include <memory>
#include <stop_token>
#include <string>

#include "muster/export.hpp"
#include "muster/publish.hpp"
#include "src/inspect/version_reports.hpp"
#include "tools/commands.hpp"
#include "tools/interruption.hpp"
#include "tools/job.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

struct PublishArguments {
  std::string model;
  std::string source;
  PublisherOptions options;
  PublishOptions version;
  JobArguments job;
  bool json = false;
};

int publish_with(Group& group, const PublishArguments& arguments) {
  return reported_once(group, [&] {
    const PublishReport report = interruptible([&](const std::stop_token& stop) {
      PublishOptions version = arguments.version;
      version.stop = stop;
      return publish_version(arguments.model, arguments.source, arguments.options, group, version);
    });
    if (group.rank() == 0)
      print_done(arguments.json ? inspect::json_report(inspect::publish_tree(report)) : inspect::publish_text(report));
    return 0;
  });
}

}  // namespace

void add_publish_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("publish", "Publish a model, or its changes, as the next version of weights");
  auto arguments = std::make_shared<PublishArguments>();
  PublisherOptions& options = arguments->options;
  command
      ->add_option("model", arguments->model,
                   "A model directory, a directory with the shards of ranks, a workspace, or a third-party checkpoint")
      ->required()
      ->type_name("MODEL");
  command->add_option("source", arguments->source, "Directory of the versions, which all hosts see; created if missing")
      ->required()
      ->type_name("SOURCE");
  command->add_option("--base", options.base, "Model directory with which the trainer and the engines begin: version 0")
      ->required()
      ->type_name("DIR");
  command->add_option("--plan", options.plan, std::string(plan_help) + " [recorded in the shards]")
      ->type_name(plan_type);
  command
      ->add_option_function<std::string>(
          "--from", [&options](const std::string& text) { options.source_layout = ParallelLayout::parse(text); },
          "Layout that MODEL was split for, if its files do not record it: 4, or tp=2,pp=2,ep=2")
      ->type_name("LAYOUT");
  auto* full = command->add_flag("--full", arguments->version.full, "Publish all tensors, not only the changes");
  command->add_option("--full-every", options.full_every, "Publish all tensors in every N-th version")
      ->check(number_from(1, 1e12))
      ->excludes(full)
      ->type_name("N");
  command
      ->add_option_function<std::string>(
          "--encoding",
          [&options](const std::string& word) {
            options.encoding =
                word == to_string(DeltaEncoding::overwrite) ? DeltaEncoding::overwrite : DeltaEncoding::exclusive_or;
          },
          "xor: new bytes XOR old ones; overwrite: positions and values of changed bytes")
      ->check(one_of({"xor", "overwrite"}))
      ->default_str("xor")
      ->type_name("xor|overwrite");
  command->add_option("--version", arguments->version.version, "Fail if the next version has another number")
      ->check(number_from(1, 1e12))
      ->type_name("N");
  command
      ->add_option("--keep", options.keep,
                   "Delete a version only if N versions are newer, one of them is full, and --keep-for has passed")
      ->check(number_from(0, 1e12))
      ->capture_default_str()
      ->type_name("N");
  add_age_option(
      *command, "--keep-for", [&options](std::chrono::seconds age) { options.keep_for = age; },
      "Delete a version only if it was published longer ago (see --keep)")
      ->default_str("10min");
  command
      ->add_option(
          "--base-copy", options.base_copy,
          "Directory on each host of the job for a copy of the newest version, with which the next is compared")
      ->type_name("DIR");
  add_stale_option(*command, options.stale_after,
                   "Also delete unfinished versions of other hosts that have not changed for this long: 30min, 2h");
  add_job_options(*command, arguments->job, "publish", "1, which uses all cores");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Inside a job (muster run -n P, torchrun, mpiexec -n P) all ranks call the command and share the work.\n"
      "The version appears in SOURCE in one step. If the command fails or is killed, no version appears.\n"
      "Exit status: 0 published; 2 not published; 3 published, but the report could not be printed.\n\n"
      "Examples:\n  muster publish checkpoint/ /shared/weights --base model/\n"
      "  muster publish shards/ /shared/weights --base model/ --plan llama --full-every 50\n"
      "  muster publish checkpoint/ /shared/weights --base model/ --base-copy /tmp/newest --json\n"
      "  muster run -n 4 -- muster publish shards/ /shared/weights --base model/ --plan llama");
  command->callback([command, arguments, &status] {
    arguments->version.progress = progress_bar();
    const auto publish = [arguments](Group& group) { return publish_with(group, *arguments); };
    const auto alone = [&] {
      return with_local_ranks(*command, std::max(arguments->job.processes, 1), {arguments->model, arguments->source},
                              publish);
    };
    status = as_called(*command, arguments->job, alone, publish);
  });
}

}  // namespace muster::tools

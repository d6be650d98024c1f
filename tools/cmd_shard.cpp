// SPDX-License-Identifier: Apache-2.0
// muster shard: a checkpoint cut into one file a rank.

#include <fmt/core.h>

#include <memory>
#include <string>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/inspect/account_output.hpp"
#include "src/inspect/convert.hpp"
#include "src/inspect/workspace_output.hpp"
#include "tools/commands.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ShardArguments {
  std::string model;
  std::string out;
  std::string plan;
  std::string ranks;
  std::string compress = "none";
  std::string carry;
  std::string abandoned_after;
  bool workspace = false;
  bool force = false;
  bool dry_run = false;
};

void shard(const ShardArguments& arguments) {
  if (arguments.out.empty() && !arguments.dry_run)
    throw Error(ErrorKind::argument, "--out is required, unless --dry-run is given");
  const ParallelLayout layout = ParallelLayout::parse(arguments.ranks);
  ShardOptions options{.force = arguments.force,
                       .to_workspace = arguments.workspace,
                       .zstd_level = inspect::parse_compression(arguments.compress),
                       .carry = arguments.carry,
                       .dry_run = arguments.dry_run,
                       .progress = progress_bar()};
  if (!arguments.abandoned_after.empty()) options.abandoned_after = inspect::parse_age(arguments.abandoned_after);
  const ShardReport report = interruptible([&](const std::stop_token& stop) {
    options.stop = stop;
    return shard_model(arguments.model, arguments.out, arguments.plan, layout, options);
  });
  std::string words;
  for (const std::string& note : report.notes) words += fmt::format("note: {}\n", note);
  if (arguments.dry_run) {
    print(words + fmt::format("{} tensors, {:.1f} MB, would be cut into {} shards of {:.1f} MB together\n",
                              report.tensors, static_cast<double>(report.bytes) / 1e6, layout.ranks(),
                              static_cast<double>(report.bytes_written) / 1e6));
    return;
  }
  words += fmt::format("{} tensors, {:.1f} MB, cut into {} shards of {:.1f} MB together: {:.2f} s, {:.2f} GB/s\n",
                       report.tensors, static_cast<double>(report.bytes) / 1e6, layout.ranks(),
                       static_cast<double>(report.bytes_written) / 1e6, report.seconds,
                       static_cast<double>(report.bytes_written) / 1e9 / report.seconds);
  words += inspect::left_line(report.left);
  if (!report.job.empty()) words += fmt::format("job {}, generation 1\n", report.job);
  print_done(words);
}

}  // namespace

void add_shard_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("shard", "Cut a checkpoint into one file a rank, or into the states of a workspace");
  auto arguments = std::make_shared<ShardArguments>();
  command->add_option("model", arguments->model, "The checkpoint: a directory in HuggingFace's layout")
      ->required()
      ->type_name("MODEL_DIR");
  command
      ->add_option("-n,--ranks,--layout", arguments->ranks,
                   "Ranks to cut for: 4 (tensor parallelism), or tp=2,pp=2,ep=2 with pipeline stages and expert ranks")
      ->required()
      ->type_name("LAYOUT");
  command->add_option("--plan", arguments->plan, plan_help)->required()->type_name(plan_type);
  command->add_option("-o,--out", arguments->out, "The directory to make")->type_name("DIR");
  command->add_flag("--workspace", arguments->workspace,
                    "DIR is a workspace: each shard is a rank's state of a new job");
  command->add_option("--compress", arguments->compress, "none, zstd or zstd:LEVEL; for the states of a workspace")
      ->capture_default_str()
      ->type_name(compress_type);
  command->add_option("--carry", arguments->carry, carry_help)->type_name("GLOBS");
  command->add_option("--abandoned-after", arguments->abandoned_after, abandoned_help)->type_name("AGE");
  command->add_flag("--dry-run", arguments->dry_run, "Show what would be cut, and any notes; write nothing");
  add_alone_flag(*command);
  command->add_flag("--force", arguments->force, "Replace DIR if it holds a model or shards and no other files");
  command->footer(
      "Sizes that the ranks do not divide are padded with zeros; the true ones stand in each shard's metadata, so\n"
      "that muster export gives the same bytes back, as do the plan and checksums. No attention head is cut through: "
      "if\n"
      "there are fewer heads than ranks, several ranks get a copy of the same head, as inference engines expect.\n\n"
      "Examples:\n  muster shard model/ --ranks 4 --plan auto --out shards/\n"
      "  muster shard model/ --ranks 4 --plan auto --workspace --out /shared/workspace\n"
      "  muster shard mixtral/ --layout tp=2,pp=2,ep=2 --plan moe --out shards/");
  command->callback([arguments, &status] {
    shard(*arguments);
    status = 0;
  });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster shard: splits a checkpoint into one file per rank.

#include <fmt/core.h>

#include <memory>
#include <string>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/inspect/reports.hpp"
#include "tools/commands.hpp"
#include "tools/forecast.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ShardArguments {
  std::string model;
  std::string out;
  std::string plan;
  ParallelLayout layout;
  std::string compress = "none";
  ShardOptions options;
};

void shard(const ShardArguments& arguments) {
  const ParallelLayout& layout = arguments.layout;
  ShardOptions options = arguments.options;
  if (arguments.out.empty() && !options.dry_run)
    throw Error(ErrorKind::invalid_argument, "--out is required, unless --dry-run is given");
  options.zstd_level = parse_compression(arguments.compress);
  options.progress = progress_bar();
  const ShardReport report = interruptible([&](const std::stop_token& stop) {
    options.stop = stop;
    return shard_model(arguments.model, arguments.out, layout, arguments.plan, options);
  });
  std::string words = inspect::notes_lines(report.notes);
  const std::string cut =
      fmt::format("{} shards of {} together", layout.ranks(), inspect::human_bytes(report.bytes_written));
  words += fmt::format("{}, {}, ", inspect::counted(report.tensors, "tensor"), inspect::human_bytes(report.bytes));
  const WindowShape windows{options.to_workspace ? 0 : shard_window_bytes};
  if (options.dry_run)
    return print(words + fmt::format("would be cut into {}\n", cut) +
                 words_of(forecast_of(report.bytes_written, windows, 1, Writers::all, arguments.out)));
  words += fmt::format("cut into {}: {:.2f} s, {:.2f} GB/s\n", cut, report.seconds,
                       static_cast<double>(report.bytes_written) / 1e9 / report.seconds);
  words += inspect::left_line(report.skipped);
  if (!report.job.empty()) words += fmt::format("job {}, generation 1\n", report.job);
  print_done(words);
}

}  // namespace

void add_shard_command(CLI::App& app, int& /*status*/) {
  CLI::App* command =
      app.add_subcommand("shard", "Cut a checkpoint into one file a rank, or into the states of a workspace");
  auto arguments = std::make_shared<ShardArguments>();
  command
      ->add_option("model", arguments->model,
                   "The checkpoint: a directory in HuggingFace's layout, or a foreign checkpoint that is whole")
      ->required()
      ->type_name("MODEL_DIR");
  command
      ->add_option_function<std::string>(
          "-n,--ranks,--layout",
          [arguments](const std::string& text) { arguments->layout = ParallelLayout::parse(text); },
          "Ranks to cut for: 4 (tensor parallelism), or tp=2,pp=2,ep=2 with pipeline stages and expert ranks")
      ->required()
      ->type_name("LAYOUT");
  command->add_option("--plan", arguments->plan, plan_help)->required()->type_name(plan_type);
  command
      ->add_option("--to-plan", arguments->options.to_plan,
                   "The plan that cuts; --plan reads the checkpoint then, which may be ranks of another program")
      ->type_name(plan_type);
  add_output_options(*command, arguments->out, arguments->options);
  command->add_flag("--workspace", arguments->options.to_workspace,
                    "DIR is a workspace: each shard is a rank's state of a new job");
  command->add_option("--compress", arguments->compress, "none, zstd or zstd:LEVEL; for the states of a workspace")
      ->capture_default_str()
      ->type_name(compress_type);
  add_rank_options(*command, arguments->options.key, arguments->options.file_pattern, arguments->options.source_layout,
                   "--from");
  add_state_options(*command, arguments->options.job_id, arguments->options.step);
  command->add_flag("--dry-run", arguments->options.dry_run, "Show what would be cut, and any notes; write nothing");
  add_alone_flag(*command);
  command->footer(
      "Sizes that the ranks do not divide are padded with zeros; the true ones stand in each shard's metadata, so\n"
      "that muster export gives the same bytes back, as do the plan and checksums. No attention head is cut through: "
      "if\n"
      "there are fewer heads than ranks, several ranks get a copy of the same head, as inference engines expect.\n\n"
      "Examples:\n  muster shard model/ --ranks 4 --plan auto --out shards/\n"
      "  muster shard model/ --ranks 4 --plan auto --workspace --out /shared/workspace\n"
      "  muster shard mixtral/ --layout tp=2,pp=2,ep=2 --plan moe --out shards/\n"
      "  muster shard iter_0001000/ --plan megatron --base hf_model/ --to-plan llama --ranks 8 --out shards/");
  command->callback([arguments] { shard(*arguments); });
}

}  // namespace muster::tools

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
  ParallelLayout to;
  std::string compress = "none";
  bool json = false;
  ShardOptions options;
};

std::string json_of(const ShardReport& report, const ParallelLayout& to, const Forecast* forecast) {
  Config json = Config::object({{"target_layout", to_string(to)},
                                {"tensors", report.tensors},
                                {"bytes", report.bytes},
                                {"bytes_written", report.bytes_written},
                                {"job", inspect::or_null(report.job)},
                                {"notes", ConfigArray(report.notes.begin(), report.notes.end())}});
  if (forecast != nullptr) {
    json["forecast"] = tree_of(*forecast);
  } else {
    json["seconds"] = report.seconds;
    json["skipped"] = inspect::skipped_tree(report.skipped);
  }
  return inspect::json_report(json);
}

void shard(const ShardArguments& arguments) {
  const ParallelLayout& to = arguments.to;
  ShardOptions options = arguments.options;
  if (arguments.out.empty() && !options.dry_run)
    throw Error(ErrorKind::invalid_argument, "--out is required, unless --dry-run is given");
  options.zstd_level = parse_compression(arguments.compress);
  options.progress = progress_bar();
  const ShardReport report = interruptible([&](const std::stop_token& stop) {
    options.stop = stop;
    return shard_model(arguments.model, arguments.out, to, arguments.plan, options);
  });
  std::string text = inspect::notes_lines(report.notes);
  const std::string shards =
      fmt::format("{} shards with a total of {}", to.ranks(), inspect::human_bytes(report.bytes_written));
  text += fmt::format("{}, {}, ", counted(report.tensors, "tensor"), inspect::human_bytes(report.bytes));
  if (options.dry_run) {
    const WindowShape windows{options.to_workspace ? 0 : shard_window_bytes};
    const Forecast forecast = forecast_of(report.bytes_written, windows, 1, Writers::all, arguments.out);
    return print(arguments.json ? json_of(report, to, &forecast)
                                : text + fmt::format("would be split into {}\n", shards) + line_of(forecast));
  }
  if (arguments.json) return print_done(json_of(report, to, nullptr));
  text += fmt::format("split into {}: {:.2f} s, {:.2f} GB/s\n", shards, report.seconds,
                      static_cast<double>(report.bytes_written) / 1e9 / report.seconds);
  text += inspect::skipped_line(report.skipped);
  if (!report.job.empty()) text += fmt::format("job {}, step 1\n", report.job);
  print_done(text);
}

}  // namespace

void add_shard_command(CLI::App& app, int& /*status*/) {
  CLI::App* command =
      app.add_subcommand("shard", "Split a checkpoint into one file per rank, or into the states of a workspace");
  auto arguments = std::make_shared<ShardArguments>();
  ShardOptions& options = arguments->options;
  command
      ->add_option("model", arguments->model,
                   "A model directory in Hugging Face layout, or another checkpoint (see --to-plan)")
      ->required()
      ->type_name("MODEL");
  command
      ->add_option_function<std::string>(
          "--to", [arguments](const std::string& text) { arguments->to = ParallelLayout::parse(text); },
          "Layout of the shards: 4 (tensor parallelism), or tp=2,pp=2,ep=2 with pipeline stages and expert ranks")
      ->required()
      ->type_name("LAYOUT");
  command->add_option("--plan", arguments->plan, plan_help)->required()->type_name(plan_type);
  command
      ->add_option("--to-plan", options.to_plan,
                   "Split with this plan; --plan then only describes the input (e.g. Megatron ranks)")
      ->type_name(plan_type);
  add_output_options(*command, arguments->out, options);
  command->add_flag("--workspace", options.to_workspace,
                    "DIR is a workspace: each shard becomes the state of a rank of a new job");
  command->add_option("--compress", arguments->compress, "States of a workspace: none, zstd or zstd:LEVEL")
      ->capture_default_str()
      ->type_name(compress_type);
  add_name_options(*command, options.select, options.exclude);
  add_rank_options(*command, options.key, options.file_pattern, options.source_layout);
  add_state_options(*command, options.job_id, options.step);
  command->add_flag("--dry-run", options.dry_run, "Print the sizes and notes; write nothing");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Sizes that the number of ranks does not divide are padded with zeros. Each shard records the true sizes, the "
      "plan\n"
      "and checksums, so that muster export restores the same bytes. Attention heads are not split: if there are "
      "fewer\n"
      "heads than ranks, several ranks get a copy of the same head, as inference engines expect.\n\n"
      "Examples:\n  muster shard model/ --to 4 --plan auto --out shards/\n"
      "  muster shard model/ --to 4 --plan auto --workspace --out /shared/workspace\n"
      "  muster shard mixtral/ --to tp=2,pp=2,ep=2 --plan moe --out shards/\n"
      "  muster shard iter_0001000/ --plan megatron --base-model hf_model/ --to-plan llama --to 8 --out shards/");
  command->callback([arguments] { shard(*arguments); });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster shard: a checkpoint cut into one file a rank.

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "tools/commands.hpp"
#include "tools/progress_bar.hpp"

namespace muster::tools {
namespace {

struct ShardArguments {
  std::string model;
  std::string out;
  std::string plan;
  std::string ranks;
  bool force = false;
};

void shard(const ShardArguments& arguments) {
  const ParallelLayout layout = ParallelLayout::parse(arguments.ranks);
  const ShardReport report = shard_model(arguments.model, arguments.out, arguments.plan, layout,
                                         {.force = arguments.force, .progress = progress_bar()});
  fmt::print("{} tensors, {:.1f} MB, cut into {} shards of {:.1f} MB together: {:.2f} s, {:.2f} GB/s\n", report.tensors,
             static_cast<double>(report.bytes) / 1e6, layout.ranks(), static_cast<double>(report.bytes_written) / 1e6,
             report.seconds, static_cast<double>(report.bytes_written) / 1e9 / report.seconds);
}

}  // namespace

void add_shard_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("shard", "Cut a checkpoint into one safetensors file a rank");
  auto arguments = std::make_shared<ShardArguments>();
  command->add_option("model", arguments->model, "The checkpoint: a directory in HuggingFace's layout")
      ->required()
      ->type_name("MODEL_DIR");
  command
      ->add_option("-n,--ranks,--layout", arguments->ranks,
                   "Ranks to cut for: 4 (tensor parallelism), or tp=2,pp=2,ep=2 with pipeline stages and expert ranks")
      ->required()
      ->type_name("LAYOUT");
  command->add_option("--plan", arguments->plan, plan_help)->required()->type_name("NAME|FILE");
  command->add_option("-o,--out", arguments->out, "The directory to make")->required()->type_name("DIR");
  command->add_flag("--force", arguments->force, "Replace DIR where it holds a model or shards");
  command->footer(
      "Sizes that the ranks do not divide are padded with zeros; the true ones stand in each shard's metadata, so "
      "that\n"
      "muster export gives the same bytes back.\n\n"
      "Examples:\n  muster shard model/ --ranks 4 --plan auto --out shards/\n"
      "  muster shard mixtral/ --layout tp=2,pp=2,ep=2 --plan moe --out shards/");
  command->callback([arguments, &status] {
    shard(*arguments);
    status = 0;
  });
}

}  // namespace muster::tools

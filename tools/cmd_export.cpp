// SPDX-License-Identifier: Apache-2.0
// muster export: shards gathered and merged into one checkpoint, by the ranks of a job or by ranks of its own.

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/launch.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/os/process.hpp"
#include "tools/commands.hpp"

namespace muster::tools {
namespace {

constexpr int cannot = 2;

struct ExportArguments {
  std::string shards;
  std::string out;
  std::string plan;
  std::uint64_t max_shard_size = ExportOptions().max_shard_size;
  bool force = false;
};

void print(const ExportReport& report) {
  const auto mb = [](std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  fmt::print("{} tensors in ({:.1f} MB), {} out ({:.1f} MB in {} file{}): {:.2f} s, {:.2f} GB/s\n", report.tensors_in,
             mb(report.bytes_in), report.tensors_out, mb(report.bytes_out), report.files, report.files == 1 ? "" : "s",
             report.seconds, mb(report.bytes_out) / 1e3 / report.seconds);
  if (!report.explain.empty()) {
    fmt::print("{} exchange{}, {:.3f} s; {}{}\n", report.exchanges, report.exchanges == 1 ? "" : "s",
               report.gather_seconds, report.exchanges == 1 ? "" : "the last one: ", report.explain);
  }
}

int export_with(SyncGroup& group, const ExportArguments& arguments) {
  const ExportOptions options{.force = arguments.force, .max_shard_size = arguments.max_shard_size};
  try {
    const ExportReport report = export_model(arguments.shards, arguments.out, arguments.plan, group, options);
    if (group.rank() == 0) print(report);
    return 0;
  } catch (const Error& error) {
    // All ranks have the same error: rank 0 says it for them, unless it may be the one that is gone.
    const bool alone = error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::peer_lost;
    if (group.rank() == 0 || alone) throw;
    return cannot;
  }
}

int export_with_own_ranks(const ExportArguments& arguments) {
  // What can be known before is said once, here, and not by a job.
  MergePlan::load(arguments.plan);
  check_output(arguments.out, arguments.force);
  const int ranks = count_shards(arguments.shards);
  if (ranks == 1) return export_with(*single_group(), arguments);

  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string(), "export",
                                      "--plan=" + arguments.plan, "--out=" + arguments.out,
                                      "--max-shard-size=" + std::to_string(arguments.max_shard_size)};
  if (arguments.force) command.emplace_back("--force");
  command.insert(command.end(), {"--", arguments.shards});
  LaunchOptions options;
  options.ranks = ranks;
  options.explained_status = cannot;
  options.name = "muster export";
  return launch_local(command, options);
}

bool is_rank_of_a_job() {
  return os::environment("MUSTER_JOB") || os::environment("WORLD_SIZE");
}

}  // namespace

void add_export_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("export", "Gather shards and merge them into one checkpoint");
  auto arguments = std::make_shared<ExportArguments>();
  command->add_option("shards", arguments->shards, "The directory with rank-00000-of-0000N.safetensors ...")
      ->required()
      ->type_name("SHARDS_DIR");
  command->add_option("--plan", arguments->plan, "A built-in plan (bert, llama) or a JSON file")
      ->required()
      ->type_name("NAME|FILE");
  command->add_option("-o,--out", arguments->out, "The directory to make")->required()->type_name("DIR");
  command->add_option("--max-shard-size", arguments->max_shard_size, "Bytes of tensors in one file: 5GB, 500MB, 2GiB")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("5GB")
      ->check(CLI::PositiveNumber)
      ->type_name("SIZE");
  command->add_flag("--force", arguments->force, "Replace DIR where it holds a model or shards");
  command->footer(
      "As a rank of a job (muster run -n N), N being the number of shards, each rank loads its own shard and the "
      "first\n"
      "gathers, merges and writes. Started alone it starts N local ranks itself.\n\n"
      "Examples:\n  muster export shards/ --plan llama --out model/\n"
      "  muster run -n 4 -- muster export shards/ --plan llama --out model/");
  command->callback([arguments, &status] {
    status = is_rank_of_a_job() ? export_with(*world(), *arguments) : export_with_own_ranks(*arguments);
  });
}

}  // namespace muster::tools

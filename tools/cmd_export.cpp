// SPDX-License-Identifier: Apache-2.0
// muster export: shards merged into one checkpoint or cut anew, by the ranks of a job or by ranks of its own.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/launch.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/inspect/account_output.hpp"
#include "src/os/process.hpp"
#include "src/sync/start.hpp"
#include "tools/commands.hpp"
#include "tools/progress_bar.hpp"

namespace muster::tools {
namespace {

constexpr int cannot = 2;

struct ExportArguments {
  std::string shards;
  std::string out;
  std::string plan;
  std::string layout;
  std::string ranks;
  std::string report;
  std::string writers = "owners";
  std::uint64_t max_shard_size = ExportOptions().max_shard_size;
  std::uint64_t memory_budget = ExportOptions().memory_budget;
  std::string job;
  std::optional<std::uint64_t> generation;
  int jobs = 0;
  bool force = false;
  bool resume = false;
  bool checksums = false;
  bool dry_run = false;
  bool json = false;
};

Writers writers_of(const ExportArguments& arguments) {
  return arguments.writers == "first" ? Writers::first : Writers::owners;
}

ExportOptions options_of(const ExportArguments& arguments) {
  ExportOptions options;
  options.force = arguments.force;
  options.max_shard_size = arguments.max_shard_size;
  options.memory_budget = arguments.memory_budget;
  options.writers = writers_of(arguments);
  if (!arguments.layout.empty()) options.layout = ParallelLayout::parse(arguments.layout);
  if (!arguments.ranks.empty()) options.to = ParallelLayout::parse(arguments.ranks);
  options.resume = arguments.resume;
  options.checksums = arguments.checksums;
  options.job = arguments.job;
  options.generation = arguments.generation;
  options.progress = progress_bar();
  return options;
}

Config json_of(const ExportReport& report, const std::string& writers) {
  Config json = inspect::account_json(report.account);
  ConfigArray written;
  for (const std::uint64_t bytes : report.bytes_written) written.emplace_back(static_cast<std::int64_t>(bytes));
  json["written"] = Config::object({{"writers", writers},
                                    {"bytes_by_rank", std::move(written)},
                                    {"windows", static_cast<std::int64_t>(report.windows)},
                                    {"files_resumed", static_cast<std::int64_t>(report.files_resumed)},
                                    {"seconds", report.seconds}});
  return json;
}

void print_notes(const ExportAccount& account) {
  for (const std::string& note : account.notes) fmt::print("note: {}\n", note);
}

void print(const ExportReport& report, const ExportArguments& arguments) {
  if (arguments.json) {
    fmt::print("{}\n", to_json(json_of(report, arguments.writers), 2));
    return;
  }
  print_notes(report.account);
  fmt::print("{}: {:.2f} s, {:.2f} GB/s\n", inspect::account_line(report.account), report.seconds,
             static_cast<double>(report.account.bytes_out - std::min(report.bytes_resumed, report.account.bytes_out)) /
                 1e9 / report.seconds);
  if (report.files_resumed != 0)
    fmt::print("{} of {} files were there already and verified\n", report.files_resumed, report.account.files);
  std::string written;
  for (std::size_t rank = 0; rank < report.bytes_written.size(); ++rank)
    written += fmt::format("{}{:.1f}", rank == 0 ? "" : ", ", static_cast<double>(report.bytes_written[rank]) / 1e6);
  fmt::print("written by rank: {} MB (writers: {}); {} windows of shared memory\n", written, arguments.writers,
             report.windows);
}

int export_with(SyncGroup& group, const ExportArguments& arguments) {
  try {
    const ExportReport report =
        export_model(arguments.shards, arguments.out, arguments.plan, group, options_of(arguments));
    if (group.rank() != 0) return 0;
    print(report, arguments);
    if (!arguments.report.empty()) write_file(arguments.report, to_json(json_of(report, arguments.writers), 2) + "\n");
    return 0;
  } catch (const Error& error) {
    // All ranks have the same error: rank 0 says it for them, unless it may be the one that is gone.
    const bool alone = error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::peer_lost;
    if (group.rank() == 0 || alone) throw;
    return cannot;
  }
}

int show_plan(const ExportArguments& arguments) {
  const ExportAccount account = plan_export(arguments.shards, arguments.plan, options_of(arguments));
  if (!arguments.json) print_notes(account);
  fmt::print("{}",
             arguments.json ? to_json(inspect::account_json(account), 2) + "\n" : inspect::account_table(account));
  if (!arguments.report.empty()) write_file(arguments.report, to_json(inspect::account_json(account), 2) + "\n");
  return 0;
}

std::vector<std::string> command_line(const ExportArguments& arguments) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                                      "export",
                                      "--out=" + arguments.out,
                                      "--writers=" + arguments.writers,
                                      "--max-shard-size=" + std::to_string(arguments.max_shard_size),
                                      "--memory-budget=" + std::to_string(arguments.memory_budget)};
  if (!arguments.plan.empty()) command.push_back("--plan=" + arguments.plan);
  if (!arguments.layout.empty()) command.push_back("--layout=" + arguments.layout);
  if (!arguments.ranks.empty()) command.push_back("--ranks=" + arguments.ranks);
  if (!arguments.report.empty()) command.push_back("--report=" + arguments.report);
  if (!arguments.job.empty()) command.push_back("--job=" + arguments.job);
  if (arguments.generation) command.push_back("--generation=" + std::to_string(*arguments.generation));
  if (arguments.force) command.emplace_back("--force");
  if (arguments.resume) command.emplace_back("--resume");
  if (arguments.checksums) command.emplace_back("--checksums");
  if (arguments.json) command.emplace_back("--json");
  command.insert(command.end(), {"--", arguments.shards});
  return command;
}

int export_with_own_ranks(const ExportArguments& arguments) {
  // What can be known before is said once, here, and not by a job.
  check_output(arguments.out, arguments.force);
  plan_export(arguments.shards, arguments.plan, options_of(arguments));
  const int shards = count_shards(arguments.shards, arguments.job);
  const int jobs = std::min(arguments.jobs != 0 ? arguments.jobs : os::usable_cores(), shards);
  if (jobs == 1) return export_with(*single_group(), arguments);
  LaunchOptions options;
  options.ranks = jobs;
  options.explained_status = cannot;
  options.name = "muster export";
  return launch_local(command_line(arguments), options);
}

bool is_rank_of_a_job() {
  return os::environment("MUSTER_JOB") || sync::find_start(sync::own_surroundings()).by != sync::StartedBy::alone;
}

}  // namespace

void add_export_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("export", "Merge the shards of ranks into one checkpoint, or cut them anew");
  auto arguments = std::make_shared<ExportArguments>();
  const auto size = [&](const char* name, std::uint64_t& value, const char* help, const char* otherwise) {
    command->add_option(name, value, help)
        ->transform(CLI::AsSizeValue(true))
        ->default_str(otherwise)
        ->check(CLI::PositiveNumber)
        ->type_name("SIZE");
  };
  command
      ->add_option("shards", arguments->shards,
                   "A directory with rank-00000-of-0000N.safetensors ..., or a workspace with a state of each rank")
      ->required()
      ->type_name("SHARDS_DIR");
  command
      ->add_option("--plan", arguments->plan,
                   std::string(plan_help) + "; without it, the one that the shards were cut by")
      ->type_name("NAME|FILE");
  command->add_option("-o,--out", arguments->out, "The directory to make")->type_name("DIR");
  command
      ->add_option("--layout", arguments->layout,
                   "What the shards were cut for, where they do not say it: 4, or tp=2,pp=2,ep=2")
      ->type_name("LAYOUT");
  command->add_option("--ranks", arguments->ranks, "Make shards of this layout instead of one checkpoint")
      ->type_name("LAYOUT");
  command
      ->add_option("--writers", arguments->writers, "owners: every rank writes what it has; first: rank 0 alone writes")
      ->check(CLI::IsMember({"first", "owners"}))
      ->default_str("owners")
      ->type_name("first|owners");
  size("--memory-budget", arguments->memory_budget, "Memory of all ranks together for bytes on their way", "256MiB");
  size("--max-shard-size", arguments->max_shard_size, "Bytes of tensors in one file: 5GB, 500MB, 2GiB", "5GB");
  command->add_option("--job", arguments->job, "Of a workspace with several jobs: how its number begins")
      ->type_name("PREFIX");
  command
      ->add_option("--generation", arguments->generation,
                   "Of a workspace: this generation; else the newest that all ranks have")
      ->check(CLI::PositiveNumber.description(""))
      ->type_name("G");
  command->add_option("-j,--jobs", arguments->jobs, "Own ranks to start; as many as cores, at most one a shard")
      ->check(CLI::Range(1, 4096))
      ->type_name("P");
  command->add_flag("--resume", arguments->resume,
                    "Go on with what an earlier export left, as far as it verifies; leave what there is on failure");
  command->add_flag("--checksums", arguments->checksums, "Write muster.checksums.json beside, for muster verify");
  command->add_flag("--dry-run", arguments->dry_run, "Show what would become of each tensor; write nothing");
  command->add_option("--report", arguments->report, "Write what became of each tensor to a file, as JSON")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print JSON");
  command->add_flag("--force", arguments->force, "Replace DIR where it holds a model or shards");
  command->footer(
      "As a rank of a job (muster run -n P, mpiexec -n P) each rank reads its own shards, r, r + P, ... Started alone "
      "it starts\n"
      "local ranks itself.\n\n"
      "Examples:\n  muster export shards/ --out model/\n"
      "  muster export shards/ --plan moe --dry-run\n"
      "  muster export /shared/workspace --plan auto --out model/\n"
      "  muster export shards4/ --plan llama --ranks 8 --out shards8/\n"
      "  muster run -n 4 -- muster export shards/ --plan llama --writers first --out model/\n"
      "  mpiexec -n 4 muster export shards/ --plan llama --out model/");
  command->callback([arguments, &status] {
    if (arguments->dry_run) {
      status = show_plan(*arguments);
      return;
    }
    if (arguments->out.empty()) throw Error(ErrorKind::argument, "--out is required, unless --dry-run is given");
    status = is_rank_of_a_job() ? export_with(*world(), *arguments) : export_with_own_ranks(*arguments);
  });
}

}  // namespace muster::tools

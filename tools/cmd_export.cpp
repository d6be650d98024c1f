// SPDX-License-Identifier: Apache-2.0
// muster export: merges shards into one checkpoint or splits them anew, with the ranks of a job or with local ranks
// that it starts itself.

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/model_dir.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/inspect/reports.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/workspace/survey.hpp"
#include "tools/commands.hpp"
#include "tools/forecast.hpp"
#include "tools/interruption.hpp"
#include "tools/job.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

namespace fs = std::filesystem;

struct ExportArguments {
  std::string shards;
  std::string out;
  std::string plan;
  std::string report;
  std::string fingerprint;
  std::string order;
  ExportOptions options;
  JobArguments job;
  bool dry_run = false;
  bool json = false;
};

std::string json_of(const ExportReport& report) {
  Config json = inspect::account_tree(report.manifest);
  json["written"] =
      Config::object({{"writers", to_string(report.writers)},
                      {"bytes_by_rank", ConfigArray(report.bytes_written.begin(), report.bytes_written.end())},
                      {"windows", report.windows},
                      {"files_resumed", report.files_resumed},
                      {"seconds", report.seconds}});
  json["skipped"] = inspect::skipped_tree(report.skipped);
  return inspect::json_report(json);
}

std::string text_of(const ExportReport& report, const ExportArguments& arguments) {
  if (arguments.json) return json_of(report);
  std::string text = inspect::notes_lines(report.manifest.notes);
  text += fmt::format(
      "{}: {:.2f} s, {:.2f} GB/s\n", inspect::account_line(report.manifest), report.seconds,
      static_cast<double>(report.manifest.bytes_out - std::min(report.bytes_resumed, report.manifest.bytes_out)) / 1e9 /
          report.seconds);
  if (report.files_resumed != 0)
    text += fmt::format("{} of {} files reused from the earlier export\n", report.files_resumed, report.manifest.files);
  std::string written;
  for (std::size_t rank = 0; rank < report.bytes_written.size(); ++rank)
    written += fmt::format("{}{:.1f}", rank == 0 ? "" : ", ", static_cast<double>(report.bytes_written[rank]) / 1e6);
  text += fmt::format("written by rank: {} MB (writers: {})\n", written, to_string(report.writers));
  return text + inspect::skipped_line(report.skipped);
}

// Checks the path of a file that is written after the export, so that an error is found before it.
void check_report(const ExportArguments& arguments, const char* option, const fs::path& report) {
  const auto refuse = [&](const std::string& cause) {
    throw file_error(ErrorKind::invalid_argument, option, report, cause);
  };
  if (report.empty()) return;
  std::error_code error;
  const fs::path parent = report.has_parent_path() ? report.parent_path() : ".";
  const fs::file_status status = fs::status(report, error);
  if (status.type() == fs::file_type::none) refuse(error.message());
  if (fs::is_directory(status)) refuse("is a directory. Name a file");
  if (!arguments.out.empty() && is_inside(report, arguments.out))
    refuse("is inside the output directory. Name a file elsewhere");
  if (fs::is_regular_file(status)) {
    if (is_inside(report, arguments.shards) || fs::equivalent(report, arguments.plan, error))
      refuse("is an input file. Name another file");
  } else if (fs::exists(status)) {
    return;  // a device or a pipe, which is written directly
  }
  if (::access(parent.c_str(), W_OK) != 0)
    throw os::errno_error("writing the report into the directory", errno, parent);
}

void check_reports(const ExportArguments& arguments) {
  check_report(arguments, "--report", arguments.report);
  check_report(arguments, "--fingerprint", arguments.fingerprint);
  if (!arguments.fingerprint.empty() && arguments.fingerprint == arguments.report)
    throw file_error(ErrorKind::invalid_argument, "--fingerprint", arguments.fingerprint,
                     "is the file of --report. Name another file");
}

void write_report(const std::string& path, const std::string& text) {
  struct stat target {};
  struct stat out {};
  // Standard output under another name (/dev/stdout): existing output must be kept.
  if (::stat(path.c_str(), &target) == 0 && ::fstat(STDOUT_FILENO, &out) == 0 && target.st_dev == out.st_dev &&
      target.st_ino == out.st_ino)
    return print(text);
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status) || fs::is_regular_file(status)) {
    // A link is kept: its target is made or replaced.
    if (!fs::is_symlink(path, error)) return write_file(path, text);
    return write_report((fs::path(path).parent_path() / fs::read_symlink(path)).string(), text);
  }
  // A pipe without a reader must not block the program.
  const os::Fd file(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file || ::fcntl(file.get(), F_SETFL, 0) != 0) throw os::errno_error("opening for writing", errno, path);
  if (const int failure = os::write_all(file.get(), text)) throw os::errno_error("writing", failure, path);
}

/// Writes the reports, and returns the exit status.
int report_on(const ExportReport& report, const ExportArguments& arguments) {
  int status = 0;
  const auto write = [&](const std::string& path, const char* name, const auto& text) {
    try {
      if (!path.empty()) write_report(path, text());
    } catch (const Error& error) {
      complain(fmt::format("{} is complete, but its {} could not be written: {}", in_quotes(arguments.out), name,
                           error.what()));
      status = done_unsaid;
    }
  };
  write(arguments.report, "report", [&] { return json_of(report); });
  write(arguments.fingerprint, "fingerprint", [&] { return report.fingerprint.value().text(); });
  print_done(text_of(report, arguments));
  return status;
}

int export_with(Group& group, const ExportArguments& arguments) {
  return reported_once(group, [&] {
    agree_on(group, "export: checking the report", [&] {
      if (group.rank() == 0) check_reports(arguments);
    });
    const ExportReport report = interruptible([&](const std::stop_token& stop) {
      ExportOptions options = arguments.options;
      options.stop = stop;
      return export_model(arguments.shards, arguments.out, arguments.plan, group, options);
    });
    return group.rank() == 0 ? report_on(report, arguments) : 0;
  });
}

/// Whether every process can read the whole source: a third-party checkpoint that is not stored by rank.
bool is_whole(const ExportArguments& arguments) {
  if (workspace::is_workspace_directory(arguments.shards)) return false;
  const auto found =
      thirdparty::find_checkpoint(arguments.shards, {arguments.options.key, arguments.options.file_pattern});
  return found && found->ranks == 0;
}

/// Returns the number of local ranks that an export starts. `whole` is the result of is_whole(); it matters only with
/// `processes`.
int own_ranks(const ExportArguments& arguments, bool whole) {
  const ExportOptions& options = arguments.options;
  // A single rank uses all cores with its threads.
  if (arguments.job.processes > 1 && whole) return arguments.job.processes;
  return std::min(arguments.job.processes != 0 ? arguments.job.processes : os::usable_cores(),
                  count_shards(arguments.shards, options.job_id, options.file_pattern));
}

void sort_tensors(std::vector<TensorMapping>& tensors, std::string_view order) {
  const auto name_of = [](const TensorMapping& tensor) -> std::string_view {
    return tensor.name.empty() ? tensor.origin : tensor.name;
  };
  const auto bytes_of = [](const TensorMapping& tensor) { return byte_size(tensor.spec.dtype, tensor.spec.shape); };
  if (order == "name") std::ranges::stable_sort(tensors, natural_less, name_of);
  if (order == "size") std::ranges::stable_sort(tensors, std::greater(), bytes_of);
}

int show_plan(const ExportArguments& arguments) {
  check_reports(arguments);
  const ExportOptions& options = arguments.options;
  ExportManifest account = plan_export(arguments.shards, arguments.plan, options);
  sort_tensors(account.tensors, arguments.order);
  sort_tensors(account.dropped, arguments.order);
  const bool whole = is_whole(arguments);
  const int ranks = own_ranks(arguments, whole);
  const Writers writers = writers_of(options, whole, false);
  const Forecast forecast = forecast_of(account.bytes_out, shape_windows(options.memory_budget, ranks, writers, false),
                                        ranks, writers, arguments.out);
  std::string json;
  if (arguments.json || !arguments.report.empty()) {
    Config tree = inspect::account_tree(account);
    tree["forecast"] = tree_of(forecast);
    json = inspect::json_report(tree);
  }
  print(arguments.json ? json
                       : inspect::notes_lines(account.notes) + line_of(forecast) +
                             inspect::account_table(account, output_style()));
  if (!arguments.report.empty()) write_report(arguments.report, json);
  return 0;
}

int export_with_own_ranks(const CLI::App& command, const ExportArguments& arguments) {
  // Errors that can be detected in advance are reported once, here, and not by every rank.
  check_not_source(arguments.shards, arguments.out);
  check_output(arguments.out, {arguments.options.force, {}});
  check_reports(arguments);
  plan_export(arguments.shards, arguments.plan, arguments.options);
  const int ranks = own_ranks(arguments, arguments.job.processes > 1 && is_whole(arguments));
  return with_local_ranks(command, ranks, {arguments.shards},
                          [&](Group& group) { return export_with(group, arguments); });
}

}  // namespace

void add_export_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("export", "Merge the shards of all ranks into one checkpoint, or split them anew");
  auto arguments = std::make_shared<ExportArguments>();
  ExportOptions& options = arguments->options;
  command
      ->add_option("shards", arguments->shards,
                   "A directory with rank-00000-of-0000N.safetensors ..., a workspace, a third-party checkpoint, or a "
                   "model")
      ->required()
      ->type_name("SOURCE");
  command->add_option("--plan", arguments->plan, std::string(plan_help) + " [recorded in the shards]")
      ->type_name(plan_type);
  add_output_options(*command, arguments->out, options);
  add_rank_options(*command, options.key, options.file_pattern, options.source_layout);
  command
      ->add_option_function<std::string>(
          "--to", [&options](const std::string& text) { options.target_layout = ParallelLayout::parse(text); },
          "Write shards of this layout instead of one checkpoint")
      ->type_name("LAYOUT");
  command
      ->add_option("--to-plan", options.to_plan,
                   "Plan for the new shards (with --to); default: --plan, or auto for third-party ranks")
      ->type_name(plan_type);
  command
      ->add_option_function<std::string>(
          "--writers",
          [&options](const std::string& word) {
            options.writers = word == to_string(Writers::rank0) ? Writers::rank0 : Writers::all;
          },
          "rank0: rank 0 writes everything; all: every rank writes its own data [all for several hosts on a network "
          "file system and for self-describing sources, otherwise rank0]")
      ->check(one_of({"rank0", "all"}))
      ->type_name("rank0|all");
  add_size_option(*command, "--memory-budget", options.memory_budget, "Total buffer memory of all ranks", "256MiB");
  add_size_option(*command, "--max-shard-size", options.max_shard_size, "Largest file of the checkpoint", "5GB");
  add_cast_options(*command, options.dtype, options.cast_all);
  add_name_options(*command, options.select, options.exclude);
  add_state_options(*command, options.job_id, options.step);
  add_job_options(*command, arguments->job, "export",
                  "cores, at most one per shard; 1 for self-describing checkpoints");
  command->add_flag("--resume", options.resume,
                    "Continue an interrupted export: reuse its files that verify, and keep them on failure");
  command->add_flag("--checksums", options.checksums, "Also write muster.checksums.json for muster verify");
  auto* fingerprint =
      command
          ->add_option("--fingerprint", arguments->fingerprint,
                       "Write the fingerprint of the checkpoint to a file; --checksums then has its CRCs")
          ->type_name("FILE");
  auto* dry_run =
      command
          ->add_flag("--dry-run", arguments->dry_run, "Print the manifest (what becomes of each tensor); write nothing")
          ->excludes(fingerprint);
  add_sort_option(*command, arguments->order, {"file", "name", "size"},
                  "With --dry-run: order of the tensors; size: largest first")
      ->needs(dry_run);
  command->add_option("--report", arguments->report, "Write the manifest to a file, as JSON")->type_name("FILE");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Inside a job (muster run -n P, mpiexec -n P) all ranks call the command, and rank r reads the shards r, r + P, "
      "...\n"
      "Outside of a job, or with --standalone, the command starts local ranks.\n\n"
      "Examples:\n  muster export shards/ --out model/\n"
      "  muster export shards/ --plan moe --dry-run\n"
      "  muster export /shared/workspace --plan auto --out model/\n"
      "  muster export pytorch_model.bin --out model/\n"
      "  muster export global_step400/ --key model --out model/\n"
      "  muster export shards4/ --plan llama --to 8 --out shards8/\n"
      "  muster export iter_0001000/ --plan megatron --base-model hf_model/ --to 8 --to-plan llama --out shards/\n"
      "  muster run -n 4 -- muster export shards/ --plan llama --writers rank0 --out model/\n"
      "  mpiexec -n 4 muster export shards/ --plan llama --out model/");
  command->callback([command, arguments, &status] {
    arguments->options.progress = progress_bar();
    arguments->options.fingerprint = !arguments->fingerprint.empty();
    if (arguments->dry_run) {
      status = show_plan(*arguments);
      return;
    }
    if (arguments->out.empty())
      throw Error(ErrorKind::invalid_argument, "--out is required, unless --dry-run is given");
    status = as_called(
        *command, arguments->job, [&] { return export_with_own_ranks(*command, *arguments); },
        [&](Group& group) { return export_with(group, *arguments); });
  });
}

}  // namespace muster::tools

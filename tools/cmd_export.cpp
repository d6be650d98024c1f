// SPDX-License-Identifier: Apache-2.0
// muster export: merges shards into one checkpoint or splits them anew, with the ranks of a job or with local ranks
// that it starts itself.

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/launch.hpp"
#include "muster/model_dir.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/inspect/reports.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"
#include "src/rendezvous/world.hpp"
#include "src/workspace/survey.hpp"
#include "tools/commands.hpp"
#include "tools/forecast.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

namespace fs = std::filesystem;

struct ExportArguments {
  std::string shards;
  std::string out;
  std::string plan;
  std::string report;
  ExportOptions options;
  int jobs = 0;
  bool dry_run = false;
  bool json = false;
  bool alone = false;
};

std::string json_of(const ExportReport& report) {
  Config json = inspect::account_tree(report.account);
  json["written"] =
      Config::object({{"writers", to_string(report.writers)},
                      {"bytes_by_rank", ConfigArray(report.bytes_written.begin(), report.bytes_written.end())},
                      {"windows", report.windows},
                      {"files_resumed", report.files_resumed},
                      {"seconds", report.seconds}});
  json["not_carried"] = inspect::list_of(report.left, [](const Omission& file) {
    return Config::object({{"file", file.name}, {"reason", file.reason}});
  });
  return inspect::json_report(json);
}

std::string words_of(const ExportReport& report, const ExportArguments& arguments) {
  if (arguments.json) return json_of(report);
  std::string words = inspect::notes_lines(report.account.notes);
  words += fmt::format(
      "{}: {:.2f} s, {:.2f} GB/s\n", inspect::account_line(report.account), report.seconds,
      static_cast<double>(report.account.bytes_out - std::min(report.bytes_resumed, report.account.bytes_out)) / 1e9 /
          report.seconds);
  if (report.files_resumed != 0)
    words +=
        fmt::format("{} of {} files were there already and verified\n", report.files_resumed, report.account.files);
  std::string written;
  for (std::size_t rank = 0; rank < report.bytes_written.size(); ++rank)
    written += fmt::format("{}{:.1f}", rank == 0 ? "" : ", ", static_cast<double>(report.bytes_written[rank]) / 1e6);
  words += fmt::format("written by rank: {} MB (writers: {})\n", written, to_string(report.writers));
  return words + inspect::left_line(report.left);
}

// Checks the report's path before anything is written, so that an error is not found only after the export.
void check_report(const ExportArguments& arguments) {
  const fs::path report = arguments.report;
  const auto refuse = [&](const std::string& words) {
    throw file_error(ErrorKind::argument, "writing the report", arguments.report, words);
  };
  if (report.empty()) return;
  std::error_code error;
  const fs::path parent = report.has_parent_path() ? report.parent_path() : ".";
  const fs::file_status status = fs::status(report, error);
  if (status.type() == fs::file_type::none) refuse(error.message());
  if (fs::is_directory(status)) refuse("it is a directory");
  if (!arguments.out.empty() && is_inside(report, arguments.out))
    refuse("it is in the directory that is made; name another one");
  if (fs::is_regular_file(status)) {
    if (is_inside(report, arguments.shards) || fs::equivalent(report, arguments.plan, error))
      refuse("it is a file that is read; name another one");
  } else if (fs::exists(status)) {
    return;  // a device or a pipe, which is written directly
  }
  if (::access(parent.c_str(), W_OK) != 0)
    throw os::errno_error("writing the report into the directory", errno, parent);
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

int export_with(SyncGroup& group, const ExportArguments& arguments) {
  ExportReport report;
  try {
    agree_on(group, "export: looking at the report", [&] {
      if (group.rank() == 0) check_report(arguments);
    });
    report = interruptible([&](const std::stop_token& stop) {
      ExportOptions options = arguments.options;
      options.stop = stop;
      return export_model(arguments.shards, arguments.out, arguments.plan, group, options);
    });
  } catch (const Error& error) {
    // All ranks have the same error, so only rank 0 prints it, unless rank 0 may be the lost one.
    const bool alone = error.kind() == ErrorKind::timeout || error.kind() == ErrorKind::peer_lost;
    if (group.rank() == 0 || alone) throw;
    return cannot;
  }
  if (group.rank() != 0) return 0;
  int status = 0;
  try {
    if (!arguments.report.empty()) write_report(arguments.report, json_of(report));
  } catch (const Error& error) {
    complain(fmt::format("{} is complete, but not its report: {}", in_quotes(arguments.out), error.what()));
    status = done_unsaid;
  }
  print_done(words_of(report, arguments));
  return status;
}

/// Whether every process can read the whole source: a foreign checkpoint that is not stored by rank.
bool is_whole(const ExportArguments& arguments) {
  if (workspace::is_workspace_directory(arguments.shards)) return false;
  const auto found = thirdparty::find_checkpoint(arguments.shards, {arguments.options.at, arguments.options.shards});
  return found && found->ranks == 0;
}

/// Returns the number of local ranks that an export starts. `whole` is the result of is_whole(); it matters only with
/// `jobs`.
int own_ranks(const ExportArguments& arguments, bool whole) {
  const ExportOptions& options = arguments.options;
  // A single rank uses all cores with its threads.
  if (arguments.jobs > 1 && whole) return arguments.jobs;
  return std::min(arguments.jobs != 0 ? arguments.jobs : os::usable_cores(),
                  count_shards(arguments.shards, options.job, options.shards));
}

int show_plan(const ExportArguments& arguments) {
  check_report(arguments);
  const ExportOptions& options = arguments.options;
  const ExportAccount account = plan_export(arguments.shards, arguments.plan, options);
  const bool whole = is_whole(arguments);
  const int ranks = own_ranks(arguments, whole);
  const Writers writers = writers_of(options, whole, false);
  const Forecast forecast = forecast_of(account.bytes_out, shape_windows(options.memory_budget, ranks, writers, false),
                                        ranks, writers, arguments.out);
  std::string json;
  if (arguments.json || !arguments.report.empty()) {
    Config tree = inspect::account_tree(account);
    tree["forecast"] = Config::object({{"bytes", forecast.bytes},
                                       {"memory", forecast.memory},
                                       {"free", forecast.free ? Config(*forecast.free) : Config()}});
    json = inspect::json_report(tree);
  }
  print(arguments.json ? json
                       : inspect::notes_lines(account.notes) + words_of(forecast) +
                             inspect::account_table(account, output_style()));
  if (!arguments.report.empty()) write_report(arguments.report, json);
  return 0;
}

/// Returns this command line, for the local ranks.
std::vector<std::string> command_line(const CLI::App& command, const ExportArguments& arguments) {
  std::vector<std::string> line = {fs::read_symlink("/proc/self/exe").string(), command.get_name()};
  for (const CLI::Option* option : command.get_options([](const CLI::Option* option) { return option->count() != 0; }))
    if (const std::string name = option->get_name(); name.starts_with("-") && name != "--jobs" && name != "--alone")
      line.push_back(name + "=" + option->results().back());
  line.insert(line.end(), {"--", arguments.shards});
  return line;
}

int export_with_own_ranks(const CLI::App& command, const ExportArguments& arguments) {
  // Errors that can be detected in advance are reported once, here, and not by every rank.
  check_not_source(arguments.shards, arguments.out);
  check_output(arguments.out, {arguments.options.force, {}});
  check_report(arguments);
  plan_export(arguments.shards, arguments.plan, arguments.options);
  const int jobs = own_ranks(arguments, arguments.jobs > 1 && is_whole(arguments));
  if (jobs == 1) return export_with(*single_group(), arguments);
  const LaunchOptions options{.ranks = jobs, .explained = {cannot, done_unsaid}, .name = "muster export"};
  return launch_local(command_line(command, arguments), options);
}

/// Returns the ranks of the job to which this process belongs. Prints a hint if the others do not arrive, because a
/// script may call the command on one rank only.
std::shared_ptr<SyncGroup> group_of_job(const group::Start& start) {
  const os::Thread reminder("a reminder", [&start](const std::stop_token& come) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    never.wait_for(lock, come, std::chrono::seconds(5), [] { return false; });
    if (!come.stop_requested())
      complain(
          fmt::format("this is a rank of a job ({}), and has waited 5 s for its other ranks to call muster export, "
                      "too: if they do not, stop it and use --alone, or set MUSTER_ALONE=1",
                      start.said));
  });
  return world();
}

int export_as_called(const CLI::App& command, const ExportArguments& arguments) {
  const group::Start start = arguments.alone ? group::Start() : group::find_start(group::own_surroundings());
  if (start.by == group::StartedBy::alone) return export_with_own_ranks(command, arguments);
  if (arguments.jobs != 0)
    throw Error(ErrorKind::argument,
                fmt::format("--jobs starts ranks of its own, and this is a rank of a job ({}) whose ranks export "
                            "together: leave --jobs out, or use --alone to export by this rank's own ranks",
                            start.said));
  return export_with(*group_of_job(start), arguments);
}

}  // namespace

void add_export_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("export", "Merge the shards of ranks into one checkpoint, or cut them anew");
  auto arguments = std::make_shared<ExportArguments>();
  ExportOptions& options = arguments->options;
  const auto size = [&](const char* name, std::uint64_t& value, const char* help, const char* otherwise) {
    command
        ->add_option_function<std::string>(
            name,
            [&value, name](const std::string& text) {
              try {
                value = inspect::parse_size(text);
              } catch (const Error& error) {
                throw error.with_context(name);
              }
            },
            help)
        ->default_str(otherwise)
        ->type_name("SIZE");
  };
  command
      ->add_option("shards", arguments->shards,
                   "A directory with rank-00000-of-0000N.safetensors ..., a workspace with a state of each rank, a "
                   "foreign checkpoint, or a model")
      ->required()
      ->type_name("SHARDS_DIR");
  command
      ->add_option("--plan", arguments->plan,
                   std::string(plan_help) + "; without it, the one that the shards were cut by")
      ->type_name(plan_type);
  add_output_options(*command, arguments->out, options);
  add_rank_options(*command, options.at, options.shards, options.layout);
  command
      ->add_option_function<std::string>(
          "--ranks", [&options](const std::string& text) { options.to = ParallelLayout::parse(text); },
          "Make shards of this layout instead of one checkpoint")
      ->type_name("LAYOUT");
  command
      ->add_option("--to-plan", options.to_plan,
                   "By which --ranks cuts; else --plan, or auto if that is of another program's ranks")
      ->type_name(plan_type);
  command
      ->add_option_function<std::string>(
          "--writers",
          [&options](const std::string& word) {
            options.writers = word == to_string(Writers::first) ? Writers::first : Writers::owners;
          },
          "owners: every rank writes what it has; first: rank 0 alone writes; default: owners for several hosts on a "
          "network file system and for what every rank can read whole, else first")
      ->check(CLI::IsMember({"first", "owners"}))
      ->type_name("first|owners");
  size("--memory-budget", options.memory_budget, "Memory of all ranks together for bytes on their way", "256MiB");
  size("--max-shard-size", options.max_shard_size, "Bytes of tensors in one file: 5GB, 500MB, 2GiB", "5GB");
  command
      ->add_option_function<std::string>(
          "--dtype", [&options](const std::string& word) { options.dtype = dtype_from_string(word); },
          "Cast floating point tensors as they are read; scales, and F32 tensors of a base in F16 or BF16, stay")
      ->check(CLI::IsMember({"F32", "F16", "BF16"}, CLI::ignore_case))
      ->type_name("F32|F16|BF16");
  command->add_flag("--cast-all", options.cast_all, "With --dtype: cast also what the base or the source keeps in F32");
  command->add_option("--select", options.select, "Only tensors whose names fit: '*layers.0.*', '{a,b}*'")
      ->type_name("GLOB");
  command->add_option("--exclude", options.exclude, "Not the tensors whose names fit")->type_name("GLOB");
  add_state_options(*command, options.job, options.generation);
  command
      ->add_option("-j,--jobs", arguments->jobs,
                   "Own ranks to start; as many as cores, at most one a shard; of a whole foreign checkpoint one")
      ->check(CLI::Range(1, 4096))
      ->type_name("P");
  command->add_flag("--alone", arguments->alone,
                    "Inside a job: export by this process alone; the other ranks do not take part (as MUSTER_ALONE=1)");
  command->add_flag("--resume", options.resume,
                    "Go on with what an earlier export left, as far as it verifies; leave what there is on failure");
  command->add_flag("--checksums", options.checksums, "Write muster.checksums.json beside, for muster verify");
  command->add_flag("--dry-run", arguments->dry_run, "Show what would become of each tensor; write nothing");
  command->add_option("--report", arguments->report, "Write what became of each tensor to a file, as JSON")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(
      "As a rank of a job (muster run -n P, mpiexec -n P) each rank reads its own shards, r, r + P, ... Started alone, "
      "or\n"
      "with --alone, it starts local ranks itself.\n\n"
      "Examples:\n  muster export shards/ --out model/\n"
      "  muster export shards/ --plan moe --dry-run\n"
      "  muster export /shared/workspace --plan auto --out model/\n"
      "  muster export pytorch_model.bin --out model/\n"
      "  muster export global_step400/ --at model --out model/\n"
      "  muster export shards4/ --plan llama --ranks 8 --out shards8/\n"
      "  muster export iter_0001000/ --plan megatron --base hf_model/ --ranks 8 --to-plan llama --out shards/\n"
      "  muster run -n 4 -- muster export shards/ --plan llama --writers first --out model/\n"
      "  mpiexec -n 4 muster export shards/ --plan llama --out model/");
  command->callback([command, arguments, &status] {
    arguments->options.progress = progress_bar();
    if (arguments->dry_run) {
      status = show_plan(*arguments);
      return;
    }
    if (arguments->out.empty()) throw Error(ErrorKind::argument, "--out is required, unless --dry-run is given");
    status = export_as_called(*command, *arguments);
  });
}

}  // namespace muster::tools

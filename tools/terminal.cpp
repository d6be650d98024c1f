// SPDX-License-Identifier: Apache-2.0
#include "tools/terminal.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <span>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"
#include "tools/commands.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

bool is_utf8_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const auto value = os::environment(name);
    if (!value) continue;
    return value->find("UTF-8") != std::string::npos || value->find("utf8") != std::string::npos ||
           value->find("UTF8") != std::string::npos || value->find("utf-8") != std::string::npos;
  }
  return false;
}

/// Returns the columns of a terminal; 0 if unknown.
std::size_t columns_of(int descriptor) {
  struct winsize size {};
  return ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

bool is_done = false;

[[noreturn]] void output_failed() {
  throw OutputError(os::errno_error("writing to standard output"), is_done);
}

bool is_drawn = false;
std::string called = "muster";

void print_message(std::string_view severity, std::string_view message) {
  clear_progress_bar();
  const std::string line = fmt::format("{}: {}: {}\n", called, severity, escaped(message));
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::string time_text(double seconds) {
  const auto whole = std::lround(seconds);
  return whole < 60 ? fmt::format("{} s", whole) : fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

/// Returns the progress as one line of `columns` columns: a longer one would wrap and scroll the terminal.
std::string line_of(const Progress& progress, std::size_t columns) {
  const double part = static_cast<double>(progress.bytes) / static_cast<double>(progress.total_bytes);
  const double rate = progress.seconds > 0 ? static_cast<double>(progress.bytes) / progress.seconds : 0;
  std::string words = fmt::format("{:3.0f} %  {} of {}", part * 100, inspect::human_bytes(progress.bytes),
                                  inspect::human_bytes(progress.total_bytes));
  if (rate > 0)
    words += fmt::format("  {}/s  {} left", inspect::human_bytes(static_cast<std::uint64_t>(rate)),
                         time_text(static_cast<double>(progress.total_bytes - progress.bytes) / rate));
  // The last column stays empty, because terminals differ in their behaviour after it.
  constexpr std::size_t longest = 30;
  constexpr std::size_t shortest = 5;
  constexpr std::size_t around = 4;
  const std::size_t room = columns > words.size() + around ? std::min(columns - words.size() - around, longest) : 0;
  if (room < shortest) return words.substr(0, columns - 1);
  const auto filled = static_cast<std::size_t>(part * static_cast<double>(room));
  return fmt::format("[{}{}] {}", std::string(filled, '#'), std::string(room - filled, '.'), words);
}

void draw(const Progress& progress) {
  clear_progress_bar();
  if (progress.bytes >= progress.total_bytes) return;
  constexpr std::size_t usual = 80;
  const std::size_t known = columns_of(STDERR_FILENO);
  std::fputs(line_of(progress, known != 0 ? known : usual).c_str(), stderr);
  is_drawn = true;
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return text;
}

}  // namespace

inspect::OutputStyle output_style() {
  inspect::OutputStyle style;
  if (::isatty(STDOUT_FILENO) == 0) return style;
  style.width = columns_of(STDOUT_FILENO);
  style.is_unicode = is_utf8_locale();
  style.is_coloured = !os::environment("NO_COLOR") && os::environment("TERM").value_or("dumb") != "dumb";
  return style;
}

void prepare_standard_streams() {
  // The opposite access modes make any use of a closed stream an error.
  for (const auto& [standard, mode] :
       {std::pair{STDIN_FILENO, O_WRONLY}, {STDOUT_FILENO, O_RDONLY}, {STDERR_FILENO, O_RDONLY}})
    if (::fcntl(standard, F_GETFD) < 0) ::open("/dev/null", mode);
  // A handler, because programs that are started from here would inherit SIG_IGN.
  os::SignalAction(SIGPIPE).handle_where_default([](int) {});
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) output_failed();
}

void print_done(std::string_view text) {
  is_done = true;
  print(text);
}

void flush_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) output_failed();
}

void clear_progress_bar() {
  if (is_drawn) std::fputs("\r\x1b[K", stderr);
  is_drawn = false;
}

ProgressCallback progress_bar() {
  if (::isatty(STDERR_FILENO) == 0) return {};
  return [last = -1.0](const Progress& progress) mutable {
    if (progress.bytes < progress.total_bytes && progress.seconds - last < 0.1) return;
    last = progress.seconds;
    draw(progress);
  };
}

void set_called_name(std::string name) {
  called = std::move(name);
}

int complain(std::string_view message) {
  print_message("error", message);
  return cannot;
}

void remark(std::string_view message) {
  print_message("note", message);
}

void add_rank_options(CLI::App& command, std::string& key, std::string& file_pattern,
                      std::optional<ParallelLayout>& from) {
  command.add_option("--key", key, key_help)->type_name("KEY");
  command
      .add_option("--file-pattern", file_pattern, "Rank files of other programs: their names, rank{rank}.safetensors")
      ->type_name("PATTERN");
  command
      .add_option_function<std::string>(
          "--from", [&from](const std::string& text) { from = ParallelLayout::parse(text); },
          "Layout that the source was split for, if its files do not record it: 4, or tp=2,pp=2,ep=2")
      ->type_name("LAYOUT");
}

void add_state_options(CLI::App& command, std::string& job_id, std::optional<std::uint64_t>& step) {
  command.add_option("--job-id", job_id, "Workspace with several jobs: the first digits of the job ID")
      ->type_name("PREFIX");
  command.add_option("--step", step, "Workspace: this step instead of the newest complete one")
      ->check(number_from(0, 1e18))
      ->type_name("N");
}

void add_checkpoint_options(CLI::App& command, Request& request) {
  add_rank_options(command, request.thirdparty.key, request.thirdparty.file_pattern, request.source_layout);
  command
      .add_option("--base-model", request.base_model, "Rank files: a model directory whose config.json the plan reads")
      ->type_name("DIR");
}

void add_source_options(CLI::App& command, Request& request) {
  command.add_option("--plan", request.plan, plan_help)->type_name(plan_type);
  add_checkpoint_options(command, request);
  command.add_option("--rank", request.states.rank, "Workspace: only the state of this rank")
      ->check(number_from(0, 1e9))
      ->type_name("N");
  add_state_options(command, request.states.job, request.states.step);
}

CLI::Option* add_json_flag(CLI::App& command, bool& json) {
  return command.add_flag("--json", json, "Print JSON");
}

namespace {

void add_glob_option(CLI::App& command, const char* name, std::string& glob, const char* help) {
  command
      .add_option_function<std::vector<std::string>>(
          name, [&glob](const std::vector<std::string>& globs) { glob = any_of_globs(globs); }, help)
      ->type_name("GLOB")
      ->allow_extra_args(false);
}

}  // namespace

void add_cast_options(CLI::App& command, std::optional<DType>& dtype, bool& cast_all) {
  command
      .add_option_function<std::string>(
          "--dtype", [&dtype](const std::string& word) { dtype = dtype_from_string(upper(word)); },
          "Cast floating-point tensors, except scales, and F32 tensors of a base model in F16 or BF16")
      ->check(CLI::Validator(
          [](std::string& text) {
            return one_of({"F32", "F16", "BF16"})(text = upper(text));
          },
          ""))
      ->type_name("F32|F16|BF16");
  command.add_flag("--cast-all", cast_all, "With --dtype: also cast the F32 tensors of the base model or source");
}

void add_name_options(CLI::App& command, std::string& select, std::string& exclude) {
  add_glob_option(command, "--select", select, "Only tensors with a matching name: '*.mlp.*', '{a,b}*' (repeatable)");
  add_glob_option(command, "--exclude", exclude, "Without the tensors with a matching name (repeatable)");
}

void add_filter_options(CLI::App& command, TensorFilter& filter) {
  add_name_options(command, filter.select, filter.exclude);
  command
      .add_option_function<std::vector<std::string>>(
          "--only-dtype",
          [&filter](const std::vector<std::string>& words) {
            for (const std::string& word : words) {
              const std::optional<DType> dtype = dtype_from_string(word);
              if (!dtype)
                throw Error(ErrorKind::invalid_argument,
                            fmt::format("--only-dtype: {} is not a dtype (examples: F32, BF16, "
                                        "F8_E4M3)",
                                        in_quotes(word)));
              filter.dtypes.push_back(*dtype);
            }
          },
          "Only tensors of this dtype: BF16 (repeatable)")
      ->type_name("DTYPE")
      ->allow_extra_args(false);
  add_size_option(command, "--larger-than", filter.larger_than, "Only tensors of more bytes: 100MB");
}

CLI::Option* add_sort_option(CLI::App& command, std::string& order, const std::vector<std::string>& orders,
                             const std::string& help, bool has_default) {
  return command.add_option("--sort", order, help)
      ->default_str(has_default ? orders.front() : "")
      ->check(one_of(orders))
      ->type_name(fmt::format("{}", fmt::join(orders, "|")));
}

void add_size_option(CLI::App& command, const char* name, std::uint64_t& value, const char* help,
                     const char* otherwise) {
  command
      .add_option_function<std::string>(
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
}

CLI::Option* add_age_option(CLI::App& command, const char* name, const std::function<void(std::chrono::seconds)>& set,
                            const char* help) {
  return command
      .add_option_function<std::string>(
          name,
          [set, name](const std::string& text) {
            std::chrono::seconds age{0};
            try {
              age = inspect::parse_age(text);
            } catch (const Error& error) {
              throw error.with_context(name);
            }
            set(age);
          },
          help)
      ->type_name("AGE");
}

void add_stale_option(CLI::App& command, std::optional<std::chrono::seconds>& value, const char* help) {
  add_age_option(
      command, "--stale-after", [&value](std::chrono::seconds age) { value = age; }, help);
}

void check_new_file(const std::string& path, bool force) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status)) return;
  const auto refuse = [&](const char* cause) {
    throw Error(ErrorKind::invalid_argument, fmt::format("{}: {}", in_quotes(path), cause), {.path = path});
  };
  if (!fs::is_regular_file(status)) refuse("already exists, and is not a regular file. Name another file");
  if (!force) refuse("already exists. Pass --force to replace it");
}

void write_output_file(const std::string& path, const std::function<void(const inspect::Sink&)>& write) {
  constexpr std::size_t piece = 1 << 20;
  os::remove_dead_partials(path);
  os::PublishedFile file(path);
  std::string text;
  std::uint64_t at = 0;
  const auto flush = [&] {
    file.write_at(at, std::as_bytes(std::span(text)));
    at += text.size();
    text.clear();
  };
  write([&](std::string_view more) {
    text += more;
    if (text.size() >= piece) flush();
  });
  flush();
  file.commit(os::Durability::unsynced);
}

std::optional<int> parse_compression(const std::string& text) {
  if (text == "none") return std::nullopt;
  if (text == "zstd") return 1;
  constexpr std::string_view prefix = "zstd:";
  int level = 0;
  const char* const end = text.data() + text.size();
  if (text.starts_with(prefix)) {
    const auto [parsed, error] = std::from_chars(text.data() + prefix.size(), end, level);
    constexpr int highest = 22;
    if (error == std::errc() && parsed == end && level >= 1 && level <= highest) return level;
  }
  throw Error(ErrorKind::invalid_argument,
              fmt::format("--compress {}: unknown compression (expected none, zstd, or zstd:1 .. zstd:22)", text));
}

void add_style_options(CLI::App& command, inspect::OutputStyle& style) {
  command.add_option("--width", style.width, "Columns of the output [of the terminal]; 0: names are not shortened")
      ->type_name("N");
  command.add_flag_callback(
      "--ascii", [&style] { style.is_unicode = false; }, "Draw with ASCII characters only");
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
#include "tools/terminal.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "tools/commands.hpp"
#include "tools/progress_bar.hpp"

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

bool is_done = false;

[[noreturn]] void output_failed() {
  throw OutputError(os::errno_error("writing to standard output"), is_done);
}

}  // namespace

inspect::OutputStyle output_style() {
  inspect::OutputStyle style;
  if (::isatty(STDOUT_FILENO) == 0) return style;
  struct winsize size {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) style.width = size.ws_col;
  style.is_unicode = is_utf8_locale();
  style.is_coloured = !os::environment("NO_COLOR") && os::environment("TERM").value_or("dumb") != "dumb";
  return style;
}

void prepare_standard_streams() {
  // The other way round than they are used: whoever writes to a closed one hears of it.
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

int complain(std::string_view words) {
  clear_progress_bar();
  const std::string line = "muster: " + escaped(words) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  return cannot;
}

void add_source_options(CLI::App& command, inspect::SourceOptions& options) {
  command.add_option("--plan", options.plan, plan_help)->type_name(plan_type);
  command.add_option("--rank", options.states.rank, "Of a workspace: this rank's state alone")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("R");
  command.add_option("--generation", options.states.generation, "Of a workspace: this generation, not the newest")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("G");
  command.add_option("--job", options.states.job, "Of a workspace with several jobs: how its number begins")
      ->type_name("PREFIX");
}

void add_alone_flag(CLI::App& command) {
  command.add_flag_callback(
      "--alone", [] {}, "Accepted for scripts; this command never waits for other ranks");
}

void add_style_options(CLI::App& command, inspect::OutputStyle& style) {
  command.add_option("--width", style.width, "Columns (the terminal's); 0 leaves names whole")->type_name("N");
  command.add_flag_callback(
      "--ascii", [&style] { style.is_unicode = false; }, "Draw with ASCII characters only");
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
#include "tools/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

#include "src/os/process.hpp"
#include "tools/commands.hpp"

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

void print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void add_source_options(CLI::App& command, inspect::SourceOptions& options) {
  command.add_option("--plan", options.plan, plan_help)->type_name("NAME|FILE");
  command.add_option("--rank", options.states.rank, "Of a workspace: this rank's state alone")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("R");
  command.add_option("--generation", options.states.generation, "Of a workspace: this generation, not the newest")
      ->check(CLI::PositiveNumber.description(""))
      ->type_name("G");
  command.add_option("--job", options.states.job, "Of a workspace with several jobs: how its number begins")
      ->type_name("PREFIX");
}

void add_ascii_option(CLI::App& command, inspect::OutputStyle& style) {
  command.add_flag_callback(
      "--ascii", [&style] { style.is_unicode = false; }, "Draw with ASCII characters only");
}

}  // namespace muster::tools

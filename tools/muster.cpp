// SPDX-License-Identifier: Apache-2.0
// The program `muster`: subcommands that use the library. Errors are one line on standard error and exit status 2.

#include <signal.h>

#include <cerrno>
#include <exception>
#include <memory>
#include <sstream>
#include <string>

#include "muster/version.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

int run(CLI::App& app, int argc, char** argv, const int& status) {
  set_called_name(called_name(app, argc, argv));
  try {
    refuse_old_names(argc, argv);
    app.parse(argc, argv);
    return status;
  } catch (const CLI::Success& asked) {  // --help and --version
    std::ostringstream text;
    app.exit(asked, text, text);
    print(text.str());
    return 0;
  } catch (const CLI::ParseError& error) {
    return complain(usage_message(error, app));
  }
}

int output_failed(const OutputError& error) {
  if (error.is_done()) {
    complain("finished successfully, but the report could not be written to standard output (exit status 3): " +
             std::string(error.what()));
    return done_unsaid;
  }
  // If a reader such as head closes the pipe early, the program ends silently by SIGPIPE, as other programs do.
  struct sigaction action {};
  if (error.os_error() == EPIPE && ::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) {
    ::signal(SIGPIPE, SIG_DFL);
    ::raise(SIGPIPE);
  }
  return complain(error.what());
}

}  // namespace
}  // namespace muster::tools

int main(int argc, char** argv) {
  using namespace muster::tools;
  prepare_standard_streams();
  CLI::App app{
      "Collects a model that is distributed over ranks into one checkpoint; splits, verifies and inspects checkpoints"};
  app.name("muster");
  app.set_version_flag("--version", "muster " + std::string(muster::version()));
  app.require_subcommand(1);
  app.formatter(std::make_shared<HelpFormatter>());
  int status = 0;
  for (const auto add :
       {add_run_command,        add_ls_command,          add_show_command,   add_stats_command,   add_cat_command,
        add_diff_command,       add_fingerprint_command, add_verify_command, add_report_command,  add_convert_command,
        add_shard_command,      add_export_command,      add_plan_command,   add_publish_command, add_pull_command,
        add_log_command,        add_gc_command,          add_trace_command,  add_status_command,  add_doctor_command,
        add_completion_command, add_man_command})
    add(app, status);
  try {
    const int result = run(app, argc, argv, status);
    flush_output();
    return result;
  } catch (const OutputError& error) {
    return output_failed(error);
  } catch (const std::exception& error) {
    return complain(error.what());
  }
}

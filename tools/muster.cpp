// SPDX-License-Identifier: Apache-2.0
// The program `muster`: subcommands over the library, one line on standard error and status 2 for what cannot be done.

#include <cstdio>
#include <exception>
#include <string>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "tools/commands.hpp"

namespace {

constexpr int cannot = 2;

/// One line, whatever the words were: scripts read standard error line by line.
int complain(std::string words) {
  for (char& c : words)
    if (c == '\n' || c == '\r') c = ' ';
  std::fprintf(stderr, "muster: %s\n", words.c_str());
  return cannot;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Muster: tensor shards and layer configs of all ranks, gathered to the first and exported as one checkpoint"};
  app.name("muster");
  app.set_version_flag("--version", "muster " + std::string(muster::version()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  int status = 0;
  muster::tools::add_run_command(app, status);
  muster::tools::add_ls_command(app, status);
  muster::tools::add_show_command(app, status);
  muster::tools::add_stats_command(app, status);
  muster::tools::add_cat_command(app, status);
  muster::tools::add_diff_command(app, status);
  muster::tools::add_verify_command(app, status);
  muster::tools::add_convert_command(app, status);
  muster::tools::add_shard_command(app, status);
  muster::tools::add_export_command(app, status);
  muster::tools::add_gc_command(app, status);
  muster::tools::add_doctor_command(app, status);
  muster::tools::add_completion_command(app, status);
  muster::tools::add_man_command(app, status);
  try {
    app.parse(argc, argv);
    // What was printed must have arrived: a full disk behind a redirection is a failure.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return complain("writing to standard output failed");
    return status;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help and --version
    return complain(std::string(error.what()) + " (muster --help, muster COMMAND --help)");
  } catch (const std::exception& error) {
    return complain(error.what());
  }
}

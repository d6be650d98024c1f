// SPDX-License-Identifier: Apache-2.0
// muster man: the manual page, which the build installs.

#include "tools/commands.hpp"
#include "tools/man_page.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {

void add_man_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("man", "Print the manual page");
  command->footer("Example:\n  muster man | man -l -");
  command->callback([&app, &status] {
    print(man_page(describe(app)));
    status = 0;
  });
}

}  // namespace muster::tools

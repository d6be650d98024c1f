// SPDX-License-Identifier: Apache-2.0
// muster completion: scripts for shells.

#include <memory>
#include <string>

#include "tools/commands.hpp"
#include "tools/completion_script.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {

void add_completion_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("completion", "Print a completion script for bash or zsh");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "Which shell")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}).description(""))
      ->type_name("bash|zsh");
  command->footer(
      "Examples:\n  source <(muster completion bash)\n"
      "  muster completion zsh > ~/.zfunc/_muster   # where fpath has ~/.zfunc");
  command->callback([&app, shell, &status] {
    const AppDescription description = describe(app);
    print(*shell == "bash" ? bash_completion(description) : zsh_completion(description));
    status = 0;
  });
}

}  // namespace muster::tools

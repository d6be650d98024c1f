// SPDX-License-Identifier: Apache-2.0
// muster doctor: what works on this machine and in a workspace.

#include <memory>
#include <string>

#include "src/inspect/doctor.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct DoctorArguments {
  std::string workspace;
  bool json = false;
};

int examine(const DoctorArguments& arguments) {
  std::vector<inspect::Finding> findings = inspect::examine_machine();
  if (!arguments.workspace.empty())
    for (inspect::Finding& finding : inspect::examine_workspace(arguments.workspace))
      findings.push_back(std::move(finding));
  print(arguments.json ? inspect::json_report(inspect::findings_tree(findings))
                       : inspect::findings_text(findings, output_style()));
  return inspect::is_healthy(findings) ? 0 : 1;
}

}  // namespace

void add_doctor_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("doctor", "What works on this machine and in a workspace, and the remedies");
  auto arguments = std::make_shared<DoctorArguments>();
  command->add_option("workspace", arguments->workspace, "A directory that ranks share, or are to share")
      ->type_name("WORKSPACE");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "ok: it works. note: it is not there, and not everything needs it. warning: slower, or a trap. bad: something\n"
      "will not work. Exit status: 0, or 1 where something is bad. A probe is made in the workspace and removed.\n\n"
      "Examples:\n  muster doctor\n  muster run -n 1 -- muster doctor /shared/workspace");
  command->callback([arguments, &status] { status = examine(*arguments); });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster ls: what is in a workspace, or the names in a file.

#include <memory>
#include <string>

#include "src/inspect/listing.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ListArguments {
  std::string path;
  inspect::ListOptions options;
  bool json = false;
};

}  // namespace

void add_ls_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("ls", "What is in a workspace: jobs, ranks, generations; or names in a file");
  auto arguments = std::make_shared<ListArguments>();
  arguments->options.style = output_style();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  command->add_option("--plan", arguments->options.plan, plan_help)->type_name(plan_type);
  command->add_flag("--names-only", arguments->options.names_only,
                    "Of a workspace: do not look into states; complete is then what has its name");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "A state is complete when its file says so and what it says of itself is right (muster verify reads all of it).\n"
      "Of anything but a workspace, the tensors' names are listed (muster show has more).\n\n"
      "Examples:\n  muster ls /shared/workspace\n  muster ls workspace/ --json | jq '.jobs[].common_generation'\n"
      "  muster ls model.safetensors | grep norm");
  command->callback([arguments, &status] {
    print(arguments->json ? inspect::list_json(arguments->path, arguments->options)
                          : inspect::list_text(arguments->path, arguments->options));
    status = 0;
  });
}

}  // namespace muster::tools

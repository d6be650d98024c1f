// SPDX-License-Identifier: Apache-2.0
// muster show: what is in a safetensors file or a model directory.

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "src/inspect/show.hpp"
#include "tools/commands.hpp"

namespace muster::tools {
namespace {

struct ShowArguments {
  std::string path;
  inspect::ShowOptions options;
  std::string order = "offset";
  bool json = false;
};

// A pipe has no width: names stay whole for whoever searches them.
std::size_t terminal_width() {
  struct winsize size {};
  return ::isatty(STDOUT_FILENO) != 0 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

}  // namespace

void add_show_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("show", "List the tensors of a safetensors file or a model directory");
  auto arguments = std::make_shared<ShowArguments>();
  arguments->options.width = terminal_width();
  command->add_option("path", arguments->path, "A safetensors file, or a directory in HuggingFace's layout")
      ->required()
      ->type_name("FILE|DIR");
  command->add_option("--pattern", arguments->options.pattern, "Only names that match, * for anything")
      ->type_name("GLOB");
  command->add_option("--sort", arguments->order, "By name, by size (largest first) or as in the file")
      ->check(CLI::IsMember({"name", "size", "offset"}).description(""))
      ->capture_default_str()
      ->type_name("name|size|offset");
  command->add_option("--width", arguments->options.width, "Columns (the terminal's); 0 leaves names whole")
      ->type_name("N");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "Only headers are read, so that a large model takes no longer than a small one.\n\n"
      "Examples:\n  muster show model/ --pattern '*.mlp.*' --sort size\n"
      "  muster show model.safetensors --json | jq '.tensors[].name'");
  command->callback([arguments, &status] {
    using inspect::ShowOrder;
    arguments->options.order = arguments->order == "name"   ? ShowOrder::name
                               : arguments->order == "size" ? ShowOrder::size
                                                            : ShowOrder::offset;
    const std::string text = arguments->json ? inspect::show_json(arguments->path, arguments->options)
                                             : inspect::show_text(arguments->path, arguments->options);
    std::fwrite(text.data(), 1, text.size(), stdout);
    status = 0;
  });
}

}  // namespace muster::tools

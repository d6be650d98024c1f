// SPDX-License-Identifier: Apache-2.0
// muster diff: whether two files, model directories or sets of shards hold the same.

#include <cstdio>
#include <memory>
#include <string>

#include "src/inspect/diff.hpp"
#include "tools/commands.hpp"

namespace muster::tools {
namespace {

struct DiffArguments {
  std::string a;
  std::string b;
  std::string plan;
  bool json = false;
};

}  // namespace

void add_diff_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("diff", "Compare two models: files, directories or shards of ranks");
  auto arguments = std::make_shared<DiffArguments>();
  command->add_option("A", arguments->a, "A safetensors file, or a directory: in HuggingFace's layout or with shards")
      ->required()
      ->type_name("FILE|DIR");
  command->add_option("B", arguments->b, "The other one; it may have its tensors in other files or shards")
      ->required()
      ->type_name("FILE|DIR");
  command->add_option("--plan", arguments->plan, "How shards are merged: auto, a built-in plan or a JSON file")
      ->type_name("NAME|FILE");
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "Tensors are compared by name, dtype, shape and bits; between directories JSON files by value and all others\n"
      "byte by byte. Shards are merged while they are read, so that no model has to be in memory. Exit status: 0 the\n"
      "same, 1 different, 2 cannot be compared.\n\n"
      "Examples:\n  muster diff model/ exported/\n  muster diff shards/ model/ --plan auto");
  command->callback([arguments, &status] {
    const inspect::DiffReport report = inspect::diff_models(arguments->a, arguments->b, arguments->plan);
    const std::string text = arguments->json ? inspect::diff_json(report) : inspect::diff_text(report);
    std::fwrite(text.data(), 1, text.size(), stdout);
    status = report.is_same() ? 0 : 1;
  });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster stats: prints statistics of the values of tensors.

#include <memory>
#include <string>

#include "src/inspect/statistics.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct StatsArguments {
  std::string path;
  inspect::SourceOptions source;
  inspect::StatsOptions options;
  bool json = false;
};

}  // namespace

void add_stats_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("stats", "Range, mean, deviation, NaN and a histogram of tensors' values");
  auto arguments = std::make_shared<StatsArguments>();
  arguments->options.style = output_style();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  command->add_option("pattern", arguments->options.pattern, "Only names that match, * for anything")
      ->type_name("GLOB");
  command->add_option("--bins", arguments->options.bins, "Bars of a histogram")
      ->check(CLI::Range(1, 1000).description(""))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--histogram", arguments->options.has_histograms,
                    "A histogram of each tensor, not only of one alone");
  add_source_options(*command, arguments->source);
  add_style_options(*command, arguments->options.style);
  command->add_flag("--json", arguments->json, "JSON for programs");
  command->footer(
      "All values are read, by several threads and in pieces, so that no tensor has to be in memory. MIN to DEVIATION\n"
      "are of the finite values. A complex number counts as two values.\n\n"
      "Examples:\n  muster stats model/ '*.weight'\n  muster stats state.h5 layers.0.mlp.weight --bins 40\n"
      "  muster stats model/ --json | jq -r '.tensors[] | select(.nans > 0).name'");
  command->callback([arguments] {
    const inspect::Source source = inspect::open_source(arguments->path, arguments->source);
    arguments->options.progress = progress_bar();
    print(arguments->json ? inspect::json_report(inspect::stats_tree(source, arguments->options))
                          : inspect::stats_text(source, arguments->options));
  });
}

}  // namespace muster::tools

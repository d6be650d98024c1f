// SPDX-License-Identifier: Apache-2.0
// muster stats: prints statistics of the values of tensors.

#include <memory>
#include <string>

#include "src/inspect/statistics.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

struct StatsArguments {
  std::string path;
  SourceOptions source;
  inspect::StatsOptions options;
  std::string order;
  bool json = false;
};

}  // namespace

void add_stats_command(CLI::App& app, int& /*status*/) {
  CLI::App* command =
      app.add_subcommand("stats", "Print range, mean, deviation, NaN counts and histograms of tensor values");
  auto arguments = std::make_shared<StatsArguments>();
  arguments->options.style = output_style();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  add_filter_options(*command, arguments->options.filter);
  add_sort_option(*command, arguments->order, {"file", "name", "size"}, "Order of the list; size: largest first");
  command->add_option("--bins", arguments->options.bins, "Bins per histogram")
      ->check(number_from(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--histogram", arguments->options.has_histograms,
                    "Print the histogram of every tensor; a single tensor always has one");
  add_source_options(*command, arguments->source);
  add_style_options(*command, arguments->options.style);
  add_json_flag(*command, arguments->json);
  command->footer(
      "Several threads read all values in pieces, so memory does not depend on the size of a tensor. MIN to DEVIATION\n"
      "are computed from the finite values. A complex number counts as two values.\n\n"
      "Examples:\n  muster stats model/ --select '*.weight'\n"
      "  muster stats state.h5 --select layers.0.mlp.weight --bins 40\n"
      "  muster stats model/ --json | jq -r '.tensors[] | select(.nans > 0).name'");
  command->callback([arguments] {
    using inspect::StatsOrder;
    const Source source = open_source(arguments->path, arguments->source);
    inspect::StatsOptions& options = arguments->options;
    options.order = arguments->order == "name"   ? StatsOrder::name
                    : arguments->order == "size" ? StatsOrder::size
                                                 : StatsOrder::file;
    options.progress = progress_bar();
    if (arguments->json) return inspect::stats_json(source, options, print);
    print(inspect::stats_text(source, options));
  });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster diff: compares two files, model directories or sets of shards.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/reports.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct DiffArguments {
  std::string a;
  std::string b;
  SourceOptions source;
  TensorFilter filter;
  std::string order;
  bool json = false;
};

}  // namespace

void add_diff_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("diff", "Compare two models: files, directories, workspaces or shards");
  auto arguments = std::make_shared<DiffArguments>();
  command->add_option("A", arguments->a, source_help)->required()->type_name("A");
  command->add_option("B", arguments->b, "The other side; its tensors may be in other files or shards")
      ->required()
      ->type_name("B");
  add_name_options(*command, arguments->filter.select, arguments->filter.exclude);
  add_sort_option(*command, arguments->order, {"file", "name", "relative"},
                  "Order of the tensors; relative: the largest difference first");
  add_source_options(*command, arguments->source);
  add_json_flag(*command, arguments->json);
  command->footer(
      "Compares tensors by name, dtype, shape and bits. Between directories it also compares other files: JSON files "
      "by\n"
      "value, all other files byte by byte. If one side is a state, configs are compared. Shards are merged while they "
      "are\n"
      "read, so memory does not depend on the size of the model. With --select or --exclude only tensors are "
      "compared.\n"
      "Exit status: 0 the same; 1 different; 2 cannot be compared.\n\n"
      "Examples:\n  muster diff model/ exported/\n"
      "  muster diff shards/ model/ --plan auto\n"
      "  muster diff before.h5 workspace/ --rank 2");
  command->callback([arguments, &status] {
    Config report = inspect::diff_models(arguments->a, arguments->b, arguments->source, arguments->filter);
    const bool has_differences =
        std::ranges::any_of(std::array{"tensor_differences", "file_differences", "config_differences"},
                            [&](const char* kind) { return !report.at(kind).as_array().empty(); });
    if (!has_differences && !report.at("same").as_bool())
      throw Error(ErrorKind::unsupported,
                  fmt::format("{} and {}: cannot be compared completely: {}", in_quotes(arguments->a),
                              in_quotes(arguments->b), report.at("not_compared_message").as_string()));
    using inspect::DiffOrder;
    inspect::sort_differences(report, arguments->order == "name"       ? DiffOrder::name
                                      : arguments->order == "relative" ? DiffOrder::relative
                                                                       : DiffOrder::file);
    print(arguments->json ? inspect::json_report(report) : inspect::diff_text(report));
    status = has_differences ? 1 : 0;
  });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster show: prints the contents of a file, a model's directory or a workspace.

#include <memory>
#include <string>

#include "src/inspect/show.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ShowArguments {
  std::string path;
  SourceOptions source;
  inspect::ShowOptions options;
  std::string order;
  std::string config;
  bool is_config = false;
  bool is_tree = false;
  bool is_table = false;
  bool check = false;
  bool json = false;
};

void show(const ShowArguments& arguments) {
  using inspect::ShowOrder;
  using inspect::ShowView;
  const Source source = open_source(arguments.path, arguments.source);
  if (arguments.is_config) return print(inspect::show_config(source, arguments.config));
  inspect::ShowOptions options = arguments.options;
  // On a terminal, a tree shows which tensors belong together; scripts get one line per tensor.
  const bool is_tree = arguments.is_tree || (options.style.width != 0 && !arguments.is_table);
  options.view = is_tree ? ShowView::tree : ShowView::table;
  options.order = arguments.order == "name"            ? ShowOrder::name
                  : arguments.order == "size"          ? ShowOrder::size
                  : arguments.order.empty() && is_tree ? ShowOrder::natural
                                                       : ShowOrder::offset;
  options.has_issues = arguments.check;
  if (arguments.json) return inspect::show_json(source, options, print);
  print(arguments.check ? inspect::issues_text(inspect::find_issues(source), options.style)
                        : inspect::show_text(source, options));
}

}  // namespace

void add_show_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("show", "List tensors with dtype, shape and size, or print the config");
  auto arguments = std::make_shared<ShowArguments>();
  arguments->options.style = output_style();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  add_filter_options(*command, arguments->options.filter);
  add_sort_option(*command, arguments->order, {"name", "size", "offset"},
                  "Order of the list; size: largest first [offset in a table]", false);
  auto* tree = command->add_flag("--tree", arguments->is_tree, "Group names by their dots [on a terminal]");
  command->add_flag("--table", arguments->is_table, "Print one line per tensor [in a pipe]")->excludes(tree);
  command->add_flag("--expand", arguments->options.is_unfolded,
                    "Tree: also show the layers that differ only in their number");
  auto* config =
      command->add_option("--config", arguments->config, "Print the config, or the part at PLACE: layers.0.name")
          ->expected(0, 1)
          ->type_name("[PLACE]");
  command->add_flag("--check", arguments->check, "List possible defects that the headers show");
  add_source_options(*command, arguments->source);
  add_style_options(*command, arguments->options.style);
  add_json_flag(*command, arguments->json);
  command->footer(
      "Reads only headers, so the time does not depend on the size of the tensors.\n\n"
      "Examples:\n  muster show model/ --select '*.mlp.*' --sort size\n"
      "  muster show workspace/ --rank 2 --config layers.0\n"
      "  muster show model.safetensors --json | jq '.tensors[].name'");
  command->callback([arguments, config] {
    arguments->is_config = config->count() != 0;
    show(*arguments);
  });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster cat: the values of tensors.

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/inspect/show.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct CatArguments {
  std::string path;
  std::vector<std::string> names;
  SourceOptions source;
  TensorFilter filter;
  inspect::CatOptions options;
  bool json = false;
  bool raw = false;
};

void cat_all(const CatArguments& arguments) {
  using inspect::CatFormat;
  if (arguments.raw && ::isatty(STDOUT_FILENO) != 0)
    throw Error(ErrorKind::invalid_argument,
                "--raw prints bytes, and standard output is a terminal. Redirect it to a file or a pipe");
  inspect::CatOptions options = arguments.options;
  options.format = arguments.raw ? CatFormat::raw : arguments.json ? CatFormat::json : CatFormat::text;
  const Source source = open_source(arguments.path, arguments.source);
  if (arguments.names.empty() && arguments.filter.is_all())
    throw Error(ErrorKind::invalid_argument, "missing NAME. Name a tensor, or select several with --select");
  for (const std::string& name : arguments.names) inspect::cat(source, name, options, print);
  if (arguments.filter.is_all()) return;
  for (const std::size_t place : matching(source, arguments.filter))
    inspect::cat(source, source.entries()[place].name, options, print);
}

}  // namespace

void add_cat_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("cat", "Print the values of tensors or slices");
  auto arguments = std::make_shared<CatArguments>();
  arguments->options.style = output_style();
  command->add_option("path", arguments->path, source_help)->required()->type_name(source_type);
  command->add_option("names", arguments->names, "Names of tensors, each with an optional slice")
      ->type_name("NAME[SLICE]");
  add_name_options(*command, arguments->filter.select, arguments->filter.exclude);
  command->add_flag("--full", arguments->options.is_full, "Print all values; otherwise long tensors are abbreviated");
  auto* json =
      add_json_flag(*command, arguments->json)->description("Print JSON: one line per tensor, with all values");
  command->add_flag("--raw", arguments->raw, "Print the bytes of the elements as they are in memory")->excludes(json);
  add_source_options(*command, arguments->source);
  command->footer(
      "Slices have the syntax of NumPy: 0:4, ::2, -1, and ... for all other dimensions. Quote them for the shell.\n\n"
      "Examples:\n  muster cat model/ 'model.embed_tokens.weight[0:4, :8]'\n"
      "  muster cat state.h5 'layers.0.scale[..., -1]' --full\n"
      "  muster cat model/ lm_head.weight --raw > lm_head.bin");
  command->callback([arguments] { cat_all(*arguments); });
}

}  // namespace muster::tools

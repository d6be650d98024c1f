// SPDX-License-Identifier: Apache-2.0
// muster report: writes an HTML page about models, differences, workspaces, traces and versions of weights.

#include <fmt/core.h>

#include <memory>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/output.hpp"
#include "src/report/report.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

struct ReportArguments {
  std::vector<std::string> paths;
  std::string out;
  report::ReportOptions options;
  bool no_values = false;
  bool force = false;
  bool json = false;
};

/// Returns one line per section.
std::string summary_of(const Config& tree) {
  std::string text;
  for (const Config& section : tree.at("sections").as_array()) {
    const std::string& kind = section.at("section").as_string();
    if (kind == "diff") {
      text += fmt::format("diff: {} of {} differ\n", section.at("different_tensors").as_uint(),
                          counted(section.at("tensors").as_uint(), "tensor"));
      continue;
    }
    text +=
        fmt::format("{}: {}", kind, inspect::printable(section.at(kind == "versions" ? "source" : "path").as_string()));
    if (kind == "model") {
      const std::uint64_t tensors = section.at("tensors").as_uint();
      const std::size_t rows = section.at("rows").at("name").size();
      text += fmt::format(", {}", counted(tensors, "tensor"));
      if (rows != tensors) text += fmt::format(" in {} (--select shows parts in full)", counted(rows, "row"));
      if (const std::uint64_t lost = section.at("not_readable").as_uint(); lost != 0)
        text += fmt::format(", {} cannot be read", lost);
    }
    if (kind == "workspace" && !section.at("model_error").is_null())
      text += fmt::format(", without tensors: {}", escaped(section.at("model_error").as_string()));
    if (kind == "trace" && section.at("spans_left_out").as_uint() != 0)
      text += fmt::format(", without the shortest {}", counted(section.at("spans_left_out").as_uint(), "span"));
    text += '\n';
  }
  return text;
}

void write_report(const ReportArguments& arguments) {
  if (arguments.out.empty() && !arguments.json)
    throw Error(ErrorKind::invalid_argument, "--out is required, unless --json is given");
  if (!arguments.out.empty()) check_new_file(arguments.out, arguments.force);
  report::ReportOptions options = arguments.options;
  options.has_values = !arguments.no_values;
  options.progress = progress_bar();
  const Config tree = report::report_tree(arguments.paths, options);
  std::string page;
  if (!arguments.out.empty()) {
    page = report::report_page(tree);
    write_new_file(arguments.out, [&](const inspect::Sink& sink) { sink(page); });
  }
  if (arguments.json) return print_done(inspect::json_report(tree));
  print_done(summary_of(tree) +
             fmt::format("{}: {}\n", inspect::printable(arguments.out), inspect::human_bytes(page.size())));
}

}  // namespace

void add_report_command(CLI::App& app, int& /*status*/) {
  CLI::App* command =
      app.add_subcommand("report", "Write an HTML page about models, workspaces, traces, versions or a diff");
  auto arguments = std::make_shared<ReportArguments>();
  report::ReportOptions& options = arguments->options;
  command
      ->add_option("paths", arguments->paths,
                   "Models, shards, files, workspaces, third-party checkpoints, directories of traces or of versions")
      ->required()
      ->type_name("PATH");
  command->add_option("-o,--out", arguments->out, "File to create; required without --json")->type_name("FILE");
  command->add_flag("--force", arguments->force, "Replace an existing file (never a link, a device or a pipe)");
  auto* diff = command->add_flag("--diff", options.is_diff, "Compare the two paths, as muster diff does");
  auto* no_values =
      command->add_flag("--no-values", arguments->no_values, "Read only headers: no statistics and no histograms");
  command
      ->add_flag("--checksums", options.has_checksums,
                 "Also check the recorded checksums; this reads all values a second time")
      ->excludes(no_values);
  command->add_option("--bins", options.bins, "Bins per histogram")
      ->check(number_from(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option_function<std::string>(
          "--layout", [arguments](const std::string& text) { arguments->options.layout = ParallelLayout::parse(text); },
          "Also show the part of each tensor that muster shard --to LAYOUT would write for each rank")
      ->type_name("LAYOUT")
      ->excludes(diff);
  add_filter_options(*command, options.filter);
  add_source_options(*command, options.source);
  add_json_flag(*command, arguments->json)->description("Print the data of the report as JSON");
  command->footer(
      "A browser opens the page without network access. If a report has more than 8,000 tensors, it joins them under\n"
      "patterns of names; --select shows some of them in full.\n\n"
      "Examples:\n  muster report model/ --out report.html\n"
      "  muster report before/ after/ --diff --out diff.html\n"
      "  muster report trace/ workspace/ --out job.html\n"
      "  muster report model/ --layout tp=4 --plan auto --no-values --out layout.html");
  command->callback([arguments] { write_report(*arguments); });
}

}  // namespace muster::tools

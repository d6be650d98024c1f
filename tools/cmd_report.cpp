// SPDX-License-Identifier: Apache-2.0
// muster report: writes an HTML page about models, differences, workspaces, traces and versions of weights.

#include <fmt/core.h>

#include <cstddef>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/output.hpp"
#include "src/report/page.hpp"
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

/// Returns ", N tensors in M rows", and the findings that the reader must not miss.
std::string model_words(const Config& section) {
  const std::uint64_t tensors = section.at("tensors").as_uint();
  const std::size_t rows = section.at("rows").at("name").size();
  std::string text = fmt::format(", {}", counted(tensors, "tensor"));
  if (rows != tensors) text += fmt::format(" in {} (--select shows parts in full)", counted(rows, "row"));
  if (const std::uint64_t lost = section.at("not_readable").as_uint(); lost != 0)
    text += fmt::format(", {} cannot be read", lost);
  const Config& verified = section.at("verify");
  if (!verified.is_null() && !verified.at("good").as_bool())
    text += fmt::format(
        ", {}", counted(verified.at("problems").size() + verified.at("problems_left_out").as_uint(), "problem"));
  if (!section.at("verify_error").is_null())
    text += fmt::format(", not verified: {}", escaped(section.at("verify_error").as_string()));
  return text;
}

std::string diff_words(const Config& section) {
  std::uint64_t tensors = 0;
  for (const Config& row : section.at("rows").at("tensors").as_array()) tensors += row.as_uint();
  std::string text =
      fmt::format("diff: {} of {} differ", section.at("different_tensors").as_uint(), counted(tensors, "tensor"));
  if (const std::string& message = section.at("not_compared_message").as_string(); !message.empty())
    text += ", " + escaped(message);
  return text;
}

/// Returns one line per section.
std::string summary_of(const Config& tree) {
  std::string text;
  for (const Config& section : tree.at("sections").as_array()) {
    const std::string& kind = section.at("section").as_string();
    if (kind == "diff") {
      text += diff_words(section) + "\n";
      continue;
    }
    text +=
        fmt::format("{}: {}", kind, inspect::printable(section.at(kind == "versions" ? "source" : "path").as_string()));
    if (kind == "model") text += model_words(section);
    if (kind == "workspace" && !section.at("model_error").is_null())
      text += fmt::format(", without tensors: {}", escaped(section.at("model_error").as_string()));
    if (kind == "trace" && section.at("spans_left_out").as_uint() != 0)
      text += fmt::format(", without the shortest {}", counted(section.at("spans_left_out").as_uint(), "span"));
    text += '\n';
  }
  return text;
}

/// With --force, a mistyped command could otherwise replace a model.
void check_replaceable(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string_view doctype = report::page_head.substr(0, report::page_head.find('>') + 1);
  std::string begin(doctype.size(), '\0');
  file.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  if (file.gcount() == 0 || begin == doctype) return;
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{}: already exists, and is not an HTML page. Name another file", in_quotes(path)),
              {.path = path});
}

void write_report(const ReportArguments& arguments) {
  report::ReportOptions options = arguments.options;
  options.has_values = !arguments.no_values;
  options.progress = progress_bar();
  if (arguments.out.empty()) {
    if (!arguments.json) throw Error(ErrorKind::invalid_argument, "--out is required, unless --json is given");
    return print(inspect::json_report(report::report_tree(arguments.paths, options)));
  }
  check_new_file(arguments.out, arguments.force);
  if (arguments.force) check_replaceable(arguments.out);
  Config tree;
  std::size_t bytes = 0;
  write_output_file(arguments.out, [&](const inspect::Sink& sink) {
    tree = report::report_tree(arguments.paths, options);
    const std::string page = report::report_page(tree);
    bytes = page.size();
    sink(page);
    check_new_file(arguments.out, arguments.force);  // reading may have taken long
  });
  print_done(arguments.json ? inspect::json_report(tree)
                            : summary_of(tree) + fmt::format("{}: {}\n", inspect::printable(arguments.out),
                                                             inspect::human_bytes(bytes)));
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
  command->add_flag("--force", arguments->force, "Replace an existing HTML page (never a link, a device or a pipe)");
  command->add_flag("--diff", options.is_diff, "Compare the two paths, as muster diff does");
  command->add_flag("--no-values", arguments->no_values, "Read only headers: no statistics and no histograms");
  command->add_flag("--checksums", options.has_checksums,
                    "Also check the recorded checksums; this reads all values a second time");
  command->add_option("--bins", options.bins, "Bins per histogram")
      ->check(number_from(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option_function<std::string>(
          "--layout", [arguments](const std::string& text) { arguments->options.layout = ParallelLayout::parse(text); },
          "Also show the part of each tensor that muster shard --to LAYOUT would write for each rank")
      ->type_name("LAYOUT");
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

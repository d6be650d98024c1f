// SPDX-License-Identifier: Apache-2.0
// muster man: the manual page, as roff for man(1), which the build installs.

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "tools/app_description.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

/// Text of a line: nothing in it is a request or an escape.
std::string roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n'))
      out += std::string("\\&") + c;
    else
      out += c;
  }
  return out;
}

std::string bold(std::string_view text) {
  return "\\fB" + roff(text) + "\\fR";
}

std::string italic(std::string_view text) {
  return "\\fI" + roff(text) + "\\fR";
}

std::string usage_of(const OptionDescription& option) {
  std::string type = italic(option.type);
  if (option.is_repeated && !option.type.ends_with("...")) type += "...";
  return option.is_required ? type : "[" + type + "]";
}

void append_option(std::string& out, const OptionDescription& option) {
  out += ".TP\n";
  std::string head;
  for (const auto* names : {&option.short_names, &option.long_names})
    for (const std::string& name : *names) head += (head.empty() ? "" : ", ") + bold(name);
  if (option.is_positional())
    head = italic(option.type);
  else if (option.takes_value)
    head += " " + italic(option.type);
  fmt::format_to(std::back_inserter(out), "{}\n{}\n", head, roff(option.help));
}

/// Paragraphs are parted by empty lines; lines that are indented stay as they are.
void append_footer(std::string& out, std::string_view footer) {
  bool is_example = false;
  bool is_begun = false;
  while (!footer.empty()) {
    const std::size_t end = std::min(footer.find('\n'), footer.size());
    const std::string_view line = footer.substr(0, end);
    footer.remove_prefix(std::min(end + 1, footer.size()));
    const bool is_indented = line.starts_with("  ");
    if (is_example && !is_indented) {
      out += ".fi\n.RE\n";
      is_example = false;
    }
    if (line.empty()) {
      is_begun = false;
      continue;
    }
    if (is_indented && !is_example) {
      out += ".RS 4\n.nf\n";
      is_example = true;
    } else if (!is_indented && !is_begun) {
      out += ".PP\n";
      is_begun = true;
    }
    out += roff(is_indented ? line.substr(2) : line) + "\n";
  }
  if (is_example) out += ".fi\n.RE\n";
}

std::string man_page(const AppDescription& app) {
  // No date: the same sources make the same page.
  std::string out =
      fmt::format(".TH MUSTER 1 \"\" \"{0} {1}\" \"User Commands\"\n.SH NAME\n{0} \\- {2}\n.SH SYNOPSIS\n", app.name,
                  app.version, roff(app.help));
  for (const CommandDescription& command : app.commands) {
    std::string arguments;
    for (const OptionDescription& option : command.options)
      if (option.is_positional()) arguments += " " + usage_of(option);
    fmt::format_to(std::back_inserter(out), "{} [{}]{}\n.br\n", bold(app.name + " " + command.name), italic("OPTIONS"),
                   arguments);
  }
  out += ".SH OPTIONS\n";
  for (const OptionDescription& option : app.options) append_option(out, option);
  out += ".SH COMMANDS\n";
  for (const CommandDescription& command : app.commands) {
    fmt::format_to(std::back_inserter(out), ".SS {}\n{}.\n", roff(command.name), roff(command.help));
    for (const OptionDescription& option : command.options)
      if (std::find(option.long_names.begin(), option.long_names.end(), "--help") == option.long_names.end())
        append_option(out, option);
    append_footer(out, command.footer);
  }
  out +=
      ".SH \"EXIT STATUS\"\n"
      ".TP\n0\nDone; the same; whole.\n"
      ".TP\n1\nDifferent, or something is wrong with what was looked at.\n"
      ".TP\n2\nIt cannot be done; one line on standard error says why.\n"
      ".TP\n3\nIt is done, but what was to be printed about it is lost: standard output is closed or full. Of "
      "commands\n"
      "that write files.\n"
      ".PP\n" +
      bold("muster run") +
      " has the status of its ranks.\n"
      ".SH ENVIRONMENT\n" +
      fmt::format(".TP\n{}\nColours are left out. They are used on a terminal only.\n", bold("NO_COLOR")) +
      fmt::format(".TP\n{}, {}, {}\nWhether terminals get characters beyond ASCII.\n", bold("LC_ALL"), bold("LC_CTYPE"),
                  bold("LANG")) +
      fmt::format(".TP\n{}\nSeconds that a wait may take without progress.\n", bold("MUSTER_TIMEOUT")) +
      fmt::format(".TP\n{}\n1: this process is no rank of a job, whatever the job's variables say.\n",
                  bold("MUSTER_ALONE")) +
      ".SH FILES\n" + fmt::format(".TP\n{}\nWhat makes a directory a workspace.\n", italic("muster-workspace.json")) +
      fmt::format(".TP\n{}\nChecksums beside a checkpoint.\n", italic("muster.checksums.json"));
  return out;
}

}  // namespace

void add_man_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("man", "Print the manual page");
  command->footer("Example:\n  muster man | man -l -");
  command->callback([&app, &status] {
    print(man_page(describe(app)));
    status = 0;
  });
}

}  // namespace muster::tools

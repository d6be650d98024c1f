// SPDX-License-Identifier: Apache-2.0
// muster completion prints completion scripts for shells. muster man prints the manual page, as roff for man(1), which
// the build installs.
//
// Both are generated from CLI11's definitions, so that they always agree with --help.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/plan.hpp"
#include "muster/version.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"
#include "tools/usage.hpp"

namespace muster::tools {
namespace {

using Options = std::vector<const CLI::Option*>;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

/// Returns the options; positional ones come first, in their order.
Options options_of(const CLI::App& app) {
  Options options = app.get_options();
  std::stable_partition(options.begin(), options.end(),
                        [](const CLI::Option* option) { return option->get_positional(); });
  return options;
}

/// Returns "-o", "--out"; empty for a positional argument.
std::vector<std::string> names_of(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

bool takes_value(const CLI::Option& option) {
  return option.get_type_size() != 0;
}

bool is_repeated(const CLI::Option& option) {
  return option.get_items_expected_max() > 1;
}

/// Returns "FILE|DIR"; empty for a flag.
std::string type_of(const CLI::Option& option) {
  return takes_value(option) ? option.get_type_name() : std::string();
}

/// Returns the choices of the value: the plans for PLAN, the methods for METHOD, and the components of a type such as
/// "name|size". A component with capitals is a kind of value and not a choice.
std::vector<std::string> words_of(const CLI::Option& option) {
  if (type_of(option) == plan_type) {
    const std::span<const std::string_view> plans = MergePlan::builtin_names();
    std::vector<std::string> words(plans.begin(), plans.end());
    words.emplace_back("auto");
    return words;
  }
  if (type_of(option) == compress_type) return {"none", "zstd"};
  std::vector<std::string> words = split(type_of(option), '|');
  std::erase_if(words, [](const std::string& word) {
    return word.empty() || word.find_first_not_of("abcdefghijklmnopqrstuvwxyz-") != std::string::npos;
  });
  return words;
}

/// Whether the value may be a path.
bool is_path(const CLI::Option& option) {
  const std::vector<std::string> kinds = split(type_of(option), '|');
  return std::ranges::any_of(kinds, [](std::string_view kind) {
    constexpr std::array paths = {"PATH", "SOURCE", "MODEL", "WORKSPACE", "IN", "OUT", "A", "B", plan_type};
    return kind.find("FILE") != std::string_view::npos || kind.find("DIR") != std::string_view::npos ||
           std::ranges::find(paths, kind) != paths.end();
  });
}

/// Returns the commands that --help lists: it leaves out those whose group has no name.
std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
}

/// A command that does something: "show", or "plan show".
struct Leaf {
  std::string name;
  const CLI::App* command;
};
std::vector<Leaf> leaves_of(const CLI::App& app, const std::string& before = {}) {
  std::vector<Leaf> leaves;
  for (const CLI::App* command : commands_of(app)) {
    const std::string name = before + command->get_name();
    const std::vector<Leaf> below = leaves_of(*command, name + " ");
    leaves.insert(leaves.end(), below.begin(), below.end());
    if (below.empty()) leaves.push_back({name, command});
  }
  return leaves;
}

std::string names_of_commands(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : commands_of(app)) names += (names.empty() ? "" : " ") + command->get_name();
  return names;
}

// Completion.

std::string all_names(const Options& options) {
  std::string out;
  for (const CLI::Option* option : options)
    for (const std::string& name : names_of(*option)) out += (out.empty() ? "" : " ") + name;
  return out;
}

/// Returns bash's action that completes a value.
std::string bash_action(const CLI::Option& option) {
  std::string words = fmt::format("COMPREPLY{}=($(compgen -W '{}' -- \"$current\"))", is_path(option) ? "+" : "",
                                  fmt::join(words_of(option), " "));
  if (!is_path(option)) return words;
  return "_muster_paths \"$current\"" + (words_of(option).empty() ? "" : "; " + words);
}

std::string with_backslashes(const std::string& text, std::string_view characters) {
  std::string out;
  for (const char c : text) {
    if (characters.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

/// Quotes a text for a single-quoted word of zsh.
std::string zsh_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'')
      out += "'\\''";
    else
      out += c;
  }
  return out + "'";
}

std::string zsh_action(const CLI::Option& option) {
  const std::string words = fmt::format("({})", fmt::join(words_of(option), " "));
  if (!is_path(option)) return words_of(option).empty() ? " " : words;
  return words_of(option).empty() ? "_files"
                                  : "_alternative \"words\\:word\\:" + words + "\" \"files\\:file\\:_files\"";
}

void append_zsh_options(std::string& out, const Options& options, std::string_view indent) {
  std::size_t position = 0;
  for (const CLI::Option* option : options) {
    const std::string help = with_backslashes(help_of(*option), "[]:\\");
    const std::string message = with_backslashes(type_of(*option), ":\\");
    if (option->get_positional()) {
      const std::string place = is_repeated(*option) ? "*" : fmt::to_string(++position);
      fmt::format_to(std::back_inserter(out), "{}{} \\\n", indent,
                     zsh_quoted(fmt::format("{}:{}:{}", place, message, zsh_action(*option))));
      continue;
    }
    for (const std::string& name : names_of(*option)) {
      // A long option's value may follow "=" or be the next word.
      const std::string glue = takes_value(*option) && name.starts_with("--") ? "=" : "";
      const std::string value = takes_value(*option) ? fmt::format(":{}:{}", message, zsh_action(*option)) : "";
      fmt::format_to(std::back_inserter(out), "{}{} \\\n", indent,
                     zsh_quoted(fmt::format("{}{}[{}]{}", name, glue, help, value)));
    }
  }
}

/// Returns a script that bash sources; it has no dependencies.
std::string bash_completion(const CLI::App& app) {
  std::vector<std::string> groups;
  for (const CLI::App* command : commands_of(app))
    if (!commands_of(*command).empty()) groups.push_back(command->get_name());
  std::string out = fmt::format(
      "# Completion of {0} for bash: source it, or put it into /usr/share/bash-completion/completions/{0}.\n"
      "_muster_paths() {{\n"
      "  local IFS=$'\\n'\n"
      "  compopt -o filenames 2> /dev/null\n"
      "  COMPREPLY=($(compgen -f -- \"$1\"))\n"
      "}}\n"
      "_muster() {{\n"
      "  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} command= word\n"
      "  COMPREPLY=()\n"
      "  # bash splits words at \"=\".\n"
      "  if [ \"$current\" = = ]; then current=; fi\n"
      "  if [ \"$previous\" = = ]; then previous=${{COMP_WORDS[COMP_CWORD - 2]}}; fi\n"
      "  for word in \"${{COMP_WORDS[@]:1:COMP_CWORD - 1}}\"; do\n"
      "    case $word in -*) continue ;; esac\n"
      "    command=${{command:+$command }}$word\n"
      "    case $command in {1}) ;; *) break ;; esac\n"
      "  done\n"
      "  case $command in\n",
      app.get_name(), fmt::join(groups, "|"));
  for (const CLI::App* command : commands_of(app))
    if (!commands_of(*command).empty())
      fmt::format_to(std::back_inserter(out), "    {}) COMPREPLY=($(compgen -W '{}' -- \"$current\")) ;;\n",
                     command->get_name(), names_of_commands(*command));
  for (const Leaf& leaf : leaves_of(app)) {
    fmt::format_to(std::back_inserter(out), "    '{}')\n      case $previous in\n", leaf.name);
    const Options options = options_of(*leaf.command);
    for (const CLI::Option* option : options) {
      if (option->get_positional() || !takes_value(*option)) continue;
      fmt::format_to(std::back_inserter(out), "        {}) {}; return ;;\n", fmt::join(names_of(*option), " | "),
                     bash_action(*option));
    }
    fmt::format_to(std::back_inserter(out),
                   "      esac\n      case $current in\n"
                   "        -*) COMPREPLY=($(compgen -W '{}' -- \"$current\")) ;;\n",
                   all_names(options));
    // All positional arguments of a command are completed alike: as the first one that can be completed.
    const auto first = std::ranges::find_if(options, [](const CLI::Option* option) {
      return option->get_positional() && (is_path(*option) || !words_of(*option).empty());
    });
    if (first != options.end()) fmt::format_to(std::back_inserter(out), "        *) {} ;;\n", bash_action(**first));
    out += "      esac ;;\n";
  }
  fmt::format_to(std::back_inserter(out),
                 "    \"\") COMPREPLY=($(compgen -W '{} {}' -- \"$current\")) ;;\n  esac\n}}\n"
                 "complete -F _muster {}\n",
                 names_of_commands(app), all_names(options_of(app)), app.get_name());
  return out;
}

/// Appends the completion of the commands of `app`, and of theirs.
void append_zsh_commands(std::string& out, const CLI::App& app, const std::string& indent) {
  fmt::format_to(std::back_inserter(out), "{}local -a commands=(\n", indent);
  for (const CLI::App* command : commands_of(app))
    fmt::format_to(std::back_inserter(out), "{}  {}\n", indent,
                   zsh_quoted(command->get_name() + ":" + with_backslashes(command->get_description(), ":\\")));
  fmt::format_to(std::back_inserter(out), "{0})\n{0}_arguments -C \\\n", indent);
  append_zsh_options(out, options_of(app), indent + "  ");
  fmt::format_to(std::back_inserter(out),
                 "{0}  '1:command:->command' \\\n"
                 "{0}  '*::argument:->argument'\n"
                 "{0}case $state in\n"
                 "{0}  command) _describe command commands ;;\n"
                 "{0}  argument)\n"
                 "{0}    case $words[1] in\n",
                 indent);
  for (const CLI::App* command : commands_of(app)) {
    fmt::format_to(std::back_inserter(out), "{}      {})\n", indent, command->get_name());
    if (commands_of(*command).empty()) {
      fmt::format_to(std::back_inserter(out), "{}        _arguments \\\n", indent);
      append_zsh_options(out, options_of(*command), indent + "          ");
      fmt::format_to(std::back_inserter(out), "{}          && return ;;\n", indent);
    } else {
      append_zsh_commands(out, *command, indent + "        ");
      fmt::format_to(std::back_inserter(out), "{}        ;;\n", indent);
    }
  }
  fmt::format_to(std::back_inserter(out), "{0}    esac ;;\n{0}esac\n", indent);
}

/// Returns a script for a directory in zsh's fpath, which can also be sourced.
std::string zsh_completion(const CLI::App& app) {
  std::string out = fmt::format(
      "#compdef {0}\n"
      "# Completion of {0} for zsh: put it into a directory of $fpath under the name _{0}.\n"
      "_muster() {{\n"
      "  local curcontext=\"$curcontext\" state line\n",
      app.get_name());
  append_zsh_commands(out, app, "  ");
  out +=
      "}\n"
      "if [ \"$funcstack[1]\" = _muster ]; then _muster \"$@\"; else compdef _muster " +
      app.get_name() + "; fi\n";
  return out;
}

// The manual page.

/// Escapes a line of text, so that it contains no request or escape.
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

std::string usage_of(const CLI::Option& option) {
  std::string type = italic(type_of(option));
  if (is_repeated(option) && !type_of(option).ends_with("...")) type += "...";
  return option.get_required() ? type : "[" + type + "]";
}

void append_option(std::string& out, const CLI::Option& option) {
  out += ".TP\n";
  std::string head;
  for (const std::string& name : names_of(option)) head += (head.empty() ? "" : ", ") + bold(name);
  const std::string type = type_of(option);
  if (takes_value(option) && !type.empty()) head += (head.empty() ? "" : " ") + italic(type);
  fmt::format_to(std::back_inserter(out), "{}\n{}\n", head, roff(help_of(option)));
}

/// Appends paragraphs, which are separated by empty lines; indented lines are kept as they are.
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

std::string man_page(const CLI::App& app) {
  // No date, so that the same sources make the same page.
  std::string out =
      fmt::format(".TH MUSTER 1 \"\" \"{0} {1}\" \"User Commands\"\n.SH NAME\n{0} \\- {2}\n.SH SYNOPSIS\n",
                  app.get_name(), version(), roff(app.get_description()));
  const std::vector<Leaf> leaves = leaves_of(app);
  for (const auto& [name, command] : leaves) {
    std::string arguments;
    for (const CLI::Option* option : options_of(*command))
      if (option->get_positional()) arguments += " " + usage_of(*option);
    fmt::format_to(std::back_inserter(out), "{} [{}]{}\n.br\n", bold(app.get_name() + " " + name), italic("OPTIONS"),
                   arguments);
  }
  out += ".SH OPTIONS\n";
  for (const CLI::Option* option : options_of(app)) append_option(out, *option);
  out += ".SH COMMANDS\n";
  for (const auto& [name, command] : leaves) {
    fmt::format_to(std::back_inserter(out), ".SS {}\n{}.\n", roff(name), roff(command->get_description()));
    for (const CLI::Option* option : options_of(*command))
      if (option != command->get_help_ptr()) append_option(out, *option);
    append_footer(out, command->get_footer());
  }
  out +=
      ".SH \"EXIT STATUS\"\n"
      ".TP\n0\nSuccess.\n"
      ".TP\n1\nThe command worked, and its finding is negative: the sides differ, or problems were found.\n"
      ".TP\n2\nThe command failed; one line on standard error gives the reason.\n"
      ".TP\n3\nThe command has written its files, but its report could not be printed.\n"
      ".PP\n" +
      bold("muster run") +
      " returns the status of its ranks.\n"
      ".SH ENVIRONMENT\n" +
      fmt::format(".TP\n{}\nSwitches colours off. Colours are used only on terminals.\n", bold("NO_COLOR")) +
      fmt::format(".TP\n{}, {}, {}\nIf they name UTF-8, lines are drawn with characters beyond ASCII.\n",
                  bold("LC_ALL"), bold("LC_CTYPE"), bold("LANG")) +
      fmt::format(".TP\n{}\nSeconds without progress until a wait fails [600].\n", bold("MUSTER_TIMEOUT")) +
      fmt::format(".TP\n{}\nA directory into which every process of a job writes a trace.\n", bold("MUSTER_TRACE")) +
      fmt::format(".TP\n{}\n1: this process is not part of a job; the variables of launchers are ignored.\n",
                  bold("MUSTER_STANDALONE")) +
      ".SH FILES\n" + fmt::format(".TP\n{}\nMarks a directory as a workspace.\n", italic("muster-workspace.json")) +
      fmt::format(".TP\n{}\nChecksums beside a checkpoint.\n", italic("muster.checksums.json"));
  return out;
}

}  // namespace

void add_completion_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("completion", "Print a completion script for bash or zsh");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "The shell")->required()->check(one_of({"bash", "zsh"}))->type_name("bash|zsh");
  command->footer(
      "Examples:\n  source <(muster completion bash)\n"
      "  muster completion zsh > ~/.zfunc/_muster   # where fpath has ~/.zfunc");
  command->callback([&app, shell] { print(*shell == "bash" ? bash_completion(app) : zsh_completion(app)); });
}

void add_man_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("man", "Print the manual page");
  command->footer("Example:\n  muster man | man -l -");
  command->callback([&app] { print(man_page(app)); });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
// muster completion: scripts for shells.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/app_description.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

std::vector<std::string> names_of(const OptionDescription& option) {
  std::vector<std::string> names = option.short_names;
  names.insert(names.end(), option.long_names.begin(), option.long_names.end());
  return names;
}

std::string all_names(const std::vector<OptionDescription>& options) {
  std::string out;
  for (const OptionDescription& option : options)
    for (const std::string& name : names_of(option)) out += (out.empty() ? "" : " ") + name;
  return out;
}

/// bash: what completes a value.
std::string bash_action(const OptionDescription& option) {
  const std::string words = fmt::format("COMPREPLY{}=($(compgen -W '{}' -- \"$current\"))", option.is_path() ? "+" : "",
                                        fmt::join(option.words(), " "));
  if (!option.is_path()) return words;
  return "_muster_paths \"$current\"" + (option.words().empty() ? "" : "; " + words);
}

std::string with_backslashes(const std::string& text, std::string_view characters) {
  std::string out;
  for (const char c : text) {
    if (characters.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

/// One word of zsh's between single quotes.
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

std::string zsh_action(const OptionDescription& option) {
  const std::string words = fmt::format("({})", fmt::join(option.words(), " "));
  if (!option.is_path()) return option.words().empty() ? " " : words;
  return option.words().empty() ? "_files" : "_alternative \"words\\:word\\:" + words + "\" \"files\\:file\\:_files\"";
}

void append_zsh_options(std::string& out, const std::vector<OptionDescription>& options, std::string_view indent) {
  std::size_t position = 0;
  for (const OptionDescription& option : options) {
    const std::string help = with_backslashes(option.help, "[]:\\");
    const std::string message = with_backslashes(option.type.empty() ? option.positional : option.type, ":\\");
    if (option.is_positional()) {
      const std::string place = option.is_repeated ? "*" : fmt::to_string(++position);
      fmt::format_to(std::back_inserter(out), "{}{} \\\n", indent,
                     zsh_quoted(fmt::format("{}:{}:{}", place, message, zsh_action(option))));
      continue;
    }
    for (const std::string& name : names_of(option)) {
      // A long option's value may stand behind "=" or in the next word.
      const std::string glue = option.takes_value && name.starts_with("--") ? "=" : "";
      const std::string value = option.takes_value ? fmt::format(":{}:{}", message, zsh_action(option)) : "";
      fmt::format_to(std::back_inserter(out), "{}{} \\\n", indent,
                     zsh_quoted(fmt::format("{}{}[{}]{}", name, glue, help, value)));
    }
  }
}

/// A script that bash sources; it needs nothing else.
std::string bash_completion(const AppDescription& app) {
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
      "    case $word in -*) ;; *) command=$word && break ;; esac\n"
      "  done\n"
      "  case $command in\n",
      app.name);
  std::string names;
  for (const CommandDescription& command : app.commands) {
    names += (names.empty() ? "" : " ") + command.name;
    fmt::format_to(std::back_inserter(out), "    {})\n      case $previous in\n", command.name);
    for (const OptionDescription& option : command.options) {
      if (option.is_positional() || !option.takes_value) continue;
      fmt::format_to(std::back_inserter(out), "        {}) {}; return ;;\n", fmt::join(names_of(option), " | "),
                     bash_action(option));
    }
    fmt::format_to(std::back_inserter(out),
                   "      esac\n      case $current in\n"
                   "        -*) COMPREPLY=($(compgen -W '{}' -- \"$current\")) ;;\n",
                   all_names(command.options));
    // All positional arguments of a command are completed alike: as its first one that can be.
    const OptionDescription* first = nullptr;
    for (const OptionDescription& option : command.options)
      if (first == nullptr && option.is_positional() && (option.is_path() || !option.words().empty())) first = &option;
    if (first != nullptr) fmt::format_to(std::back_inserter(out), "        *) {} ;;\n", bash_action(*first));
    out += "      esac ;;\n";
  }
  fmt::format_to(std::back_inserter(out),
                 "    \"\") COMPREPLY=($(compgen -W '{} {}' -- \"$current\")) ;;\n  esac\n}}\n"
                 "complete -F _muster {}\n",
                 names, all_names(app.options), app.name);
  return out;
}

/// A script for a directory of zsh's fpath, or to be sourced.
std::string zsh_completion(const AppDescription& app) {
  std::string out = fmt::format(
      "#compdef {0}\n"
      "# Completion of {0} for zsh: put it into a directory of $fpath under the name _{0}.\n"
      "_muster() {{\n"
      "  local curcontext=\"$curcontext\" state line\n"
      "  local -a commands=(\n",
      app.name);
  for (const CommandDescription& command : app.commands)
    fmt::format_to(std::back_inserter(out), "    {}\n",
                   zsh_quoted(command.name + ":" + with_backslashes(command.help, ":\\")));
  out += "  )\n  _arguments -C \\\n";
  append_zsh_options(out, app.options, "    ");
  out +=
      "    '1:command:->command' \\\n"
      "    '*::argument:->argument'\n"
      "  case $state in\n"
      "    command) _describe command commands ;;\n"
      "    argument)\n"
      "      case $words[1] in\n";
  for (const CommandDescription& command : app.commands) {
    fmt::format_to(std::back_inserter(out), "        {})\n          _arguments \\\n", command.name);
    append_zsh_options(out, command.options, "            ");
    out += "            && return ;;\n";
  }
  out +=
      "      esac ;;\n"
      "  esac\n"
      "}\n"
      "if [ \"$funcstack[1]\" = _muster ]; then _muster \"$@\"; else compdef _muster " +
      app.name + "; fi\n";
  return out;
}

}  // namespace

void add_completion_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("completion", "Print a completion script for bash or zsh");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "Which shell")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}).description(""))
      ->type_name("bash|zsh");
  command->footer(
      "Examples:\n  source <(muster completion bash)\n"
      "  muster completion zsh > ~/.zfunc/_muster   # where fpath has ~/.zfunc");
  command->callback([&app, shell, &status] {
    const AppDescription description = describe(app);
    print(*shell == "bash" ? bash_completion(description) : zsh_completion(description));
    status = 0;
  });
}

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
#include "tools/usage.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/base/similar.hpp"

namespace muster::tools {
namespace {

// The commands that read a source of ranks.
constexpr std::string_view sources = "ls show stats cat diff verify shard export plan";

constexpr std::array old = {
    OldName{"ls show stats cat diff verify convert shard export plan", "--at", "use --key"},
    OldName{sources, "--shards", "use --file-pattern"},
    OldName{sources, "--base", "use --base-model"},
    OldName{"shard export", "--carry", "use --extra-files"},
    OldName{"shard", "-n", "use --to"},
    OldName{"shard export", "--ranks", "use --to"},
    OldName{"shard", "--layout", "use --to"},
    OldName{"ls show stats cat diff verify export plan", "--layout", "use --from"},
    OldName{"export", "--writers first", "use --writers rank0"},
    OldName{"export", "--writers owners", "use --writers all"},
    OldName{"export", "--jobs", "use --processes"},
    OldName{"show stats cat diff shard export", "--job", "use --job-id"},
    OldName{"show stats cat diff shard export", "--generation", "use --step"},
    OldName{"export", "--alone", "use --standalone"},
    OldName{"diff verify shard", "--alone", "leave it out: this command never waits for other ranks"},
    OldName{"shard export", "--abandoned-after", "use --stale-after"},
    OldName{"gc", "--older-than", "use --stale-after"},
    OldName{"show", "--unfold", "use --expand"},
    OldName{"show", "--issues", "use --check"},
    OldName{"show", "--pattern", "use --select"},
    OldName{"trace", "--last", "use muster status"},
};

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(' '), list.size());
    if (list.substr(0, end) == word) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

/// Returns the command that CLI11 has found on the command line: the innermost one.
const CLI::App& innermost(const CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? app : innermost(*parsed.back());
}

std::vector<std::string_view> views_of(const std::vector<std::string>& texts) {
  return {texts.begin(), texts.end()};
}

std::string with_question(std::string message, const std::string& question) {
  return question.empty() ? message : message + "; " + question;
}

std::string unknown_argument(const CLI::App& command, const std::string& argument) {
  std::vector<std::string> known;
  const std::vector<const CLI::App*> below = command.get_subcommands([](const CLI::App*) { return true; });
  if (!below.empty() && !argument.starts_with("-")) {
    for (const CLI::App* each : below) known.push_back(each->get_name());
    return with_question(fmt::format("unknown command {}", in_quotes(argument)),
                         did_you_mean(argument, views_of(known)));
  }
  if (argument.size() > 1 && argument.starts_with("-")) {
    for (const CLI::Option* option : command.get_options())
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    const std::string name = argument.substr(0, argument.find('='));
    return with_question(fmt::format("unknown option {}", in_quotes(name)), did_you_mean(name, views_of(known)));
  }
  return with_question(fmt::format("unexpected argument {}", in_quotes(argument)),
                       command.get_name() == "stats" ? "pass a pattern of names as --select GLOB" : "");
}

std::string missing_argument(const CLI::App& command) {
  if (command.get_require_subcommand_min() > 0) return "missing COMMAND";
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_required() || option->count() != 0) continue;
    if (option->get_positional()) return "missing " + option->get_type_name();
    return fmt::format("missing --{} {}", option->get_lnames().front(), option->get_type_name());
  }
  return "an argument is missing";
}

}  // namespace

HelpFormatter::HelpFormatter() {
  label("Positionals", "Arguments");
  constexpr std::size_t width = 34;
  column_width(width);
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return app->get_description() + "\n";
}

std::string HelpFormatter::make_usage(const CLI::App* app, std::string name) const {
  std::string out = "Usage: " + name + " [OPTIONS]";
  for (const CLI::Option* option : app->get_options([](const CLI::Option* each) { return each->get_positional(); }))
    out += option->get_required() ? " " + make_option_name(option, true) : " [" + make_option_name(option, true) + "]";
  if (app->get_require_subcommand_min() > 0) out += " COMMAND";
  return out + "\n";
}

std::string HelpFormatter::make_option_name(const CLI::Option* option, bool is_positional) const {
  if (!is_positional) return CLI::Formatter::make_option_name(option, false);
  return option->get_type_name() + (option->get_items_expected_max() > 1 ? "..." : "");
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (option->get_positional() || option->get_type_size() == 0) return {};
  return " " + option->get_type_name();
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return help_of(*option);
}

std::string help_of(const CLI::Option& option) {
  const std::string& otherwise = option.get_default_str();
  if (otherwise.empty() || option.get_type_size() == 0) return option.get_description();
  return fmt::format("{} [{}]", option.get_description(), otherwise);
}

CLI::Validator number_from(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double number = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
        if (error != std::errc() || end != text.data() + text.size())
          return fmt::format("{} is not a number", in_quotes(text));
        if (number < low || number > high)
          return fmt::format("{} is out of range (valid: {} to {})", in_quotes(text), low, high);
        return std::string();
      },
      "");
}

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](std::string& text) {
        if (std::ranges::find(words, text) != words.end()) return std::string();
        return fmt::format("{} is not a valid choice (expected {})", in_quotes(text), fmt::join(words, ", "));
      },
      "");
}

std::string usage_message(const CLI::ParseError& error, const CLI::App& app) {
  const CLI::App& command = innermost(app);
  const std::vector<std::string> left = command.remaining();
  const std::string what = error.what();
  const auto replaced = [&](std::string_view before, std::string_view after) {
    const std::size_t place = what.find(before);
    return place == std::string::npos ? what
                                      : what.substr(0, place) + std::string(after) + what.substr(place + before.size());
  };
  std::string message = what;
  const auto is_a = [&](CLI::ExitCodes code) { return error.get_exit_code() == static_cast<int>(code); };
  const bool has_commands = command.get_require_subcommand_min() > 0;
  if (!left.empty() && (is_a(CLI::ExitCodes::ExtrasError) || (has_commands && is_a(CLI::ExitCodes::RequiredError))))
    message = unknown_argument(command, left.front());
  else if (is_a(CLI::ExitCodes::RequiredError))
    message = missing_argument(command);
  else if (is_a(CLI::ExitCodes::ExcludesError))
    message = replaced(" excludes ", " cannot be combined with ");
  else if (is_a(CLI::ExitCodes::RequiresError))
    message = replaced(" requires ", " is only valid with ");
  std::string name = command.get_name();
  for (const CLI::App* above = command.get_parent(); above != nullptr; above = above->get_parent())
    name = above->get_name() + " " + name;
  return fmt::format("{}{} Run {} --help.", message, message.ends_with("?") ? "" : ".", name);
}

std::string called_name(const CLI::App& app, int argc, const char* const* argv) {
  std::string name = app.get_name();
  const CLI::App* command = &app;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word.starts_with("-")) break;
    const std::vector<const CLI::App*> found =
        command->get_subcommands([&](const CLI::App* each) { return each->get_name() == word; });
    if (found.empty()) break;
    command = found.front();
    name += " " + command->get_name();
  }
  return name;
}

std::span<const OldName> old_names() noexcept {
  return old;
}

void refuse_old_names(int argc, const char* const* argv) {
  if (argc < 2) return;
  const std::string_view command = argv[1];
  for (int i = 2; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") return;
    if (!word.starts_with("-")) continue;
    const std::string_view option = word.substr(0, word.starts_with("--") ? word.find('=') : 2);
    const std::string_view value = option.size() < word.size() ? word.substr(word.find('=') + 1)
                                   : i + 1 < argc              ? std::string_view(argv[i + 1])
                                                               : std::string_view();
    for (const OldName& name : old) {
      const std::size_t blank = name.before.find(' ');
      if (!has_word(name.commands, command) || name.before.substr(0, blank) != option) continue;
      if (blank != std::string_view::npos && name.before.substr(blank + 1) != value) continue;
      throw Error(ErrorKind::invalid_argument, fmt::format("{} is not supported: {}", name.before, name.remedy));
    }
  }
}

}  // namespace muster::tools

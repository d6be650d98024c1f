// SPDX-License-Identifier: Apache-2.0
#pragma once
// Help texts, errors of the command line, and names that options had before version 0.2.

#include <CLI/CLI.hpp>

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster::tools {

/// Prints `--out DIR  Meaning [default]`: the type of a value and its default, but no check of the value.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_usage(const CLI::App* app, std::string name) const override;
  std::string make_description(const CLI::App* app) const override;
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
};

/// Returns the description of an option with its default: "Bins per histogram [16]".
std::string help_of(const CLI::Option& option);

/// Checks a value. Unlike those of CLI11, these checks do not appear in the help.
CLI::Validator number_from(double low, double high);
CLI::Validator one_of(std::vector<std::string> words);

/// Returns the message for an invalid command line.
std::string usage_message(const CLI::ParseError& error, const CLI::App& app);

/// Returns the name of the command that was called, "muster plan show"; "muster" if there is none.
std::string called_name(const CLI::App& app, int argc, const char* const* argv);

/// A name that an option or a value had before version 0.2.
struct OldName {
  std::string_view commands;  ///< the commands that had it, separated by blanks
  std::string_view before;    ///< "--at", or "--writers first" for a value
  std::string_view remedy;    ///< "use --key"
};
/// Returns all of them. A test reads this table in tools/usage.cpp.
std::span<const OldName> old_names() noexcept;
/// Throws Error(argument) that states the new name if a command line has an old one.
void refuse_old_names(int argc, const char* const* argv);

}  // namespace muster::tools

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What CLI11 knows of the program, for whatever is generated from it: completion and the manual page cannot say
// anything else than --help does.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace muster::tools {

struct OptionDescription {
  std::vector<std::string> short_names;  ///< "-o"
  std::vector<std::string> long_names;   ///< "--out"; both empty for a positional argument
  std::string positional;                ///< its name
  std::string type;                      ///< "FILE|DIR"; empty for a flag
  std::string help;
  bool is_required = false;
  bool takes_value = false;
  bool is_repeated = false;

  [[nodiscard]] bool is_positional() const noexcept { return !positional.empty(); }
  /// The words of the type ("name|size"); what has capitals in it is a kind of values.
  [[nodiscard]] std::vector<std::string> words() const;
  /// Whether a path may stand there.
  [[nodiscard]] bool is_path() const;
};

struct CommandDescription {
  std::string name;
  std::string help;
  std::string footer;
  std::vector<OptionDescription> options;  ///< positional ones first, in their order
};

struct AppDescription {
  std::string name;
  std::string help;
  std::string version;
  std::vector<OptionDescription> options;
  std::vector<CommandDescription> commands;  ///< those that --help lists
};

AppDescription describe(const CLI::App& app);

}  // namespace muster::tools

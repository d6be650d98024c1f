// SPDX-License-Identifier: Apache-2.0
#include "tools/app_description.hpp"

#include <algorithm>
#include <string_view>

#include "muster/version.hpp"

namespace muster::tools {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

std::vector<std::string> with_dashes(const std::vector<std::string>& names, std::string_view dashes) {
  std::vector<std::string> out;
  out.reserve(names.size());
  for (const std::string& name : names) out.push_back(std::string(dashes) + name);
  return out;
}

std::vector<OptionDescription> options_of(const CLI::App& app) {
  std::vector<OptionDescription> options;
  for (const CLI::Option* option : app.get_options()) {
    OptionDescription& out = options.emplace_back();
    out.short_names = with_dashes(option->get_snames(), "-");
    out.long_names = with_dashes(option->get_lnames(), "--");
    if (out.short_names.empty() && out.long_names.empty()) out.positional = option->get_name(true);
    out.takes_value = option->get_type_size() != 0;
    // Behind the colon CLI11 has what checks the value.
    if (out.takes_value) out.type = split(option->get_type_name(), ':').front();
    out.help = option->get_description();
    out.is_required = option->get_required();
    out.is_repeated = option->get_items_expected_max() > 1;
    if (!option->get_default_str().empty() && out.takes_value) out.help += " [" + option->get_default_str() + "]";
  }
  std::stable_partition(options.begin(), options.end(),
                        [](const OptionDescription& option) { return option.is_positional(); });
  return options;
}

}  // namespace

std::vector<std::string> OptionDescription::words() const {
  std::vector<std::string> words = split(type, '|');
  std::erase_if(words, [](const std::string& word) {
    return word.empty() || word.find_first_not_of("abcdefghijklmnopqrstuvwxyz-") != std::string::npos;
  });
  return words;
}

bool OptionDescription::is_path() const {
  const std::vector<std::string> kinds = split(type, '|');
  return std::any_of(kinds.begin(), kinds.end(), [](std::string_view kind) {
    return kind.find("FILE") != std::string_view::npos || kind.find("DIR") != std::string_view::npos ||
           kind.starts_with("WORKSPACE");
  });
}

AppDescription describe(const CLI::App& app) {
  AppDescription out{app.get_name(), app.get_description(), std::string(version()), options_of(app), {}};
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    // A group without a name is not in --help.
    if (command->get_group().empty()) continue;
    out.commands.push_back(
        {command->get_name(), command->get_description(), command->get_footer(), options_of(*command)});
  }
  return out;
}

}  // namespace muster::tools

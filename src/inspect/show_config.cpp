// SPDX-License-Identifier: Apache-2.0
// A config, or a part of it, by its place.

#include <fmt/core.h>

#include <charconv>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/show.hpp"

namespace muster::inspect {
namespace {

const Config* find_place(const Config& tree, std::string_view place) {
  if (tree.is_array()) {
    const std::string_view number = place.substr(0, place.find('.'));
    std::size_t index = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
    if (error != std::errc() || end != number.data() + number.size() || index >= tree.size()) return nullptr;
    const Config& item = tree.at(index);
    return number.size() == place.size() ? &item : find_place(item, place.substr(number.size() + 1));
  }
  if (!tree.is_object()) return nullptr;
  if (const Config* member = tree.as_object().find(place)) return member;
  // Keys may have dots of their own: shorter ones first, then longer ones.
  for (std::size_t dot = place.find('.'); dot != std::string_view::npos; dot = place.find('.', dot + 1)) {
    const Config* member = tree.as_object().find(place.substr(0, dot));
    if (member == nullptr) continue;
    if (const Config* found = find_place(*member, place.substr(dot + 1))) return found;
  }
  return nullptr;
}

/// The longest part of the place that is there, and what is below it.
std::string nearest(const Config& tree, std::string_view place) {
  for (std::size_t dot = place.rfind('.'); dot != std::string_view::npos && dot > 0; dot = place.rfind('.', dot - 1)) {
    const Config* found = find_place(tree, place.substr(0, dot));
    if (found == nullptr) continue;
    return fmt::format("{} is {} of {}", in_quotes(place.substr(0, dot)), to_string(found->type()), found->size());
  }
  if (!tree.is_object()) return fmt::format("it is {} of {}", to_string(tree.type()), tree.size());
  constexpr std::size_t most_named = 8;
  std::string keys;
  std::size_t named = 0;
  for (const auto& [key, value] : tree.as_object()) {
    if (named++ == most_named) {
      keys += ", ...";
      break;
    }
    keys += (keys.empty() ? "" : ", ") + in_quotes(key);
  }
  return keys.empty() ? "it is empty" : "its keys are " + keys;
}

}  // namespace

std::string show_config(const Source& source, const std::string& place) {
  const std::optional<Config> config = source.config();
  if (!config)
    throw Error(ErrorKind::not_found, fmt::format("{} has no config", in_quotes(source.path)), {.path = source.path});
  const Config* part = place.empty() ? &*config : find_place(*config, place);
  if (part == nullptr)
    throw Error(ErrorKind::not_found,
                fmt::format("the config of {} has nothing at {}; {}", in_quotes(source.path), in_quotes(place),
                            nearest(*config, place)),
                {.path = source.path});
  return json_report(*part);
}

}  // namespace muster::inspect

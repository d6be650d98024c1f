// SPDX-License-Identifier: Apache-2.0
// Any text as JSON. It is refused with an Error, or yields a tree that is restored from its own text and by split and
// join. In the tolerant reader, the members found in the text are those of the tree.

#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/formats/json_text.hpp"

namespace {

using namespace muster;

/// Only a string may be nested one level deeper in a text than in a tree that is split.
bool is_too_deep(const Config& config, int depth = 0) {
  if (depth > max_config_depth) return true;
  if (config.is_array())
    for (const Config& item : config.as_array())
      if (is_too_deep(item, depth + 1)) return true;
  if (config.is_object())
    for (const auto& [key, member] : config.as_object())
      if (is_too_deep(member, depth + 1)) return true;
  return false;
}

void check_tolerant(std::string_view text) {
  Config config;
  try {
    config = core::parse_tolerantly(text);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corrupt) std::abort();
    return;
  }
  if (!config.is_object()) return;
  const std::vector<core::JsonMember> members = core::members_of(text);
  std::set<std::string> keys;
  for (std::size_t i = members.size(); i-- > 0;) {
    const auto& [key, begin, value, end] = members[i];
    // The last of several equal keys counts.
    if (!keys.insert(key).second) continue;
    const Config* found = config.find(key);
    if (found == nullptr || !(core::parse_tolerantly(text.substr(value, end - value)) == *found)) std::abort();
  }
  if (keys.size() != config.size()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check_tolerant(text);
  Config config;
  try {
    config = parse_json(text);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corrupt) std::abort();
    return 0;
  }
  if (!(parse_json(to_json(config)) == config) || !(parse_json(to_json(config, 1)) == config)) std::abort();
  if (!is_too_deep(config) && !(join(split(config)) == config)) std::abort();
  return 0;
}

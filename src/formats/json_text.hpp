// SPDX-License-Identifier: Apache-2.0
#pragma once
// Trees as JSON text: functions in addition to those in muster/state.hpp.
//
// Values that JSON lacks are written as an object with one member, whose key is "$" and a word. If a user's own object
// looks like that, the writer puts one more "$" in front of its key, and the reader removes it.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"

namespace muster::core {

inline constexpr std::string_view float_word = "float";
inline constexpr std::string_view tensor_word = "tensor";

/// Returns the number of "$" in front of the word in the key of an object's only member; 0 for every other object.
inline std::size_t reserved_dollars(const ConfigObject& object, std::string_view word) noexcept {
  if (object.size() != 1) return 0;
  const std::string_view key = object.begin()->first;
  if (key.size() <= word.size() || !key.ends_with(word)) return 0;
  const std::size_t dollars = key.size() - word.size();
  return key.find_first_not_of('$') >= dollars ? dollars : 0;
}

/// Reads JSON of third parties as tolerantly as Python, which writes most of it. NaN, Infinity and -Infinity are
/// numbers. The last of several equal keys is used. Integers beyond 64 bits and numbers beyond a double become reals. A
/// lone surrogate becomes U+FFFD, and a byte order mark is skipped. Throws as parse_json.
Config parse_tolerantly(std::string_view text);

/// A member of an object in a JSON text: its key, and the positions of its first byte, of its value, and of the end of
/// its value.
struct JsonMember {
  std::string key;
  std::size_t begin = 0;
  std::size_t value = 0;
  std::size_t end = 0;
};
/// Returns the members of the object that begins at the first brace at or after the byte `begin`. For texts that
/// parse_tolerantly accepts. It allows callers to change some members and keep every other byte.
std::vector<JsonMember> members_of(std::string_view text, std::size_t begin = 0);

/// As parse_json. For each item of the array `key`, a member of the outermost object, `lines` receives the number of
/// the line in which the item begins, counted from 1. It stays empty if there is no such array. Local.
Config parse_json_lines(std::string_view text, std::string_view key, std::vector<std::size_t>& lines);

/// Reads a text that is an object, and calls visit(key, value) with each member as soon as it was read, which keeps
/// only one member in memory. Duplicate keys are visited twice. Objects that look like reserved words have no special
/// meaning. Throws as parse_json, and exceptions of `visit`.
using MemberVisit = std::function<void(std::string& key, Config& value)>;
void visit_members(std::string_view text, const MemberVisit& visit);

}  // namespace muster::core

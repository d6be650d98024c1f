// SPDX-License-Identifier: Apache-2.0
#pragma once
// Trees as JSON text, beside what muster/state.hpp has of it.
//
// Words that stand for what JSON lacks: an object of one member, named "$" and the word. A user's own object that looks
// like one is told from it by one more "$", on the way out put before the key and on the way in taken off.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"

namespace muster::core {

inline constexpr std::string_view float_word = "float";
inline constexpr std::string_view tensor_word = "tensor";

/// How many "$" stand before the word in the key of an object's only member; 0 for every other object.
inline std::size_t reserved_dollars(const ConfigObject& object, std::string_view word) noexcept {
  if (object.size() != 1) return 0;
  const std::string_view key = object.begin()->first;
  if (key.size() <= word.size() || !key.ends_with(word)) return 0;
  const std::size_t dollars = key.size() - word.size();
  return key.find_first_not_of('$') >= dollars ? dollars : 0;
}

/// Reads the JSON of third parties as tolerantly as Python does, which most of them are written with: NaN, Infinity and
/// -Infinity are numbers, the last of several equal keys counts, integers beyond 64 bits and numbers beyond a double
/// become reals, a lone surrogate becomes U+FFFD, and a byte order mark is passed over. Throws as parse_json.
Config parse_tolerantly(std::string_view text);

/// A member of an object in a JSON text: its key, and the places of its first byte, of its value and of the value's
/// end.
struct JsonMember {
  std::string key;
  std::size_t begin = 0;
  std::size_t value = 0;
  std::size_t end = 0;
};
/// Finds the members of the object that begins at the first bracket from the byte `begin` on. For texts that
/// parse_tolerantly accepts, to change some members and keep every other byte.
std::vector<JsonMember> members_of(std::string_view text, std::size_t begin = 0);

/// As parse_json. `lines` gets one number an item: the line, from 1 on, where that item of the array `key` begins,
/// which is a member of the outermost object. Local. It stays empty if there is no such array.
Config parse_json_lines(std::string_view text, std::string_view key, std::vector<std::size_t>& lines);

/// Calls visit(key, value) with each member of the object that a text is, when it has been read: no more than one
/// member is in memory. Keys that are there twice are visited twice, and objects that look like a word are no word.
/// Throws as parse_json, and what `visit` throws.
using MemberVisit = std::function<void(std::string& key, Config& value)>;
void visit_members(std::string_view text, const MemberVisit& visit);

}  // namespace muster::core

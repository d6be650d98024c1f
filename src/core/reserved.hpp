// SPDX-License-Identifier: Apache-2.0
#pragma once
// Words that stand for what JSON lacks: an object of one member, named "$" and the word. A user's own object that looks
// like one is told from it by one more "$", on the way out put before the key and on the way in taken off.

#include <string_view>

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

}  // namespace muster::core

// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON whose reader wants to say where in the text a thing stands that is wrong only by its meaning.

#include <cstddef>
#include <string_view>
#include <vector>

#include "muster/config.hpp"

namespace muster::core {

/// As parse_json. `lines` gets one number an item: the line, from 1 on, where that item of the array `key` begins,
/// which is a member of the outermost object. Local. It stays empty where there is no such array.
Config parse_json_lines(std::string_view text, std::string_view key, std::vector<std::size_t>& lines);

}  // namespace muster::core

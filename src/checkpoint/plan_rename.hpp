// SPDX-License-Identifier: Apache-2.0
#pragma once
// The new names of a plan's rules: text in which `$1` stands for what the pattern's first star (group) does, `$$` for a
// dollar. Everything here is local.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

/// Literal text, or the part of the old name with that index (from 0 on).
struct RenamePart {
  std::string text = {};
  std::size_t group = 0;
  bool is_group = false;
};

/// Throws Error(argument) on a `$` that no number follows and on numbers that are not from 1 to `groups`.
std::vector<RenamePart> parse_rename(std::string_view rename, std::size_t groups);

}  // namespace muster

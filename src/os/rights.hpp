// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who may do what with a file or a directory: what replaces one keeps its rights.

#include <cstdint>
#include <optional>
#include <string>

namespace muster::os {

struct Rights {
  std::uint32_t mode = 0;  ///< permission bits
  std::uint32_t owner = 0;
  std::uint32_t group = 0;
};
/// Of the name itself, and not of what a link leads to. None if there is no such name. Throws Error(io).
std::optional<Rights> rights_of(const std::string& path);
/// Owner and group change as far as this process may change them. If the group cannot be set, group and others get no
/// rights. Throws Error(io | not_found).
void set_rights(const std::string& path, const Rights& rights);

}  // namespace muster::os

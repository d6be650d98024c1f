// SPDX-License-Identifier: Apache-2.0
#pragma once
// Owner, group and mode of a file or directory. A file that replaces another one gets the rights of the replaced file.

#include <cstdint>
#include <optional>
#include <string>

namespace muster::os {

struct Rights {
  std::uint32_t mode = 0;  ///< permission bits
  std::uint32_t owner = 0;
  std::uint32_t group = 0;
};
/// Returns the rights of `path`, without following a link; nullopt if it does not exist. Throws Error(io).
std::optional<Rights> rights_of(const std::string& path);
/// Sets the rights of `path`. Owner and group are changed only if this process may do so. If the group cannot be set,
/// neither the group nor other users get permissions. Throws Error(io | not_found).
void set_rights(const std::string& path, const Rights& rights);

}  // namespace muster::os

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Owner, group and mode of a file or directory. A file that replaces another one keeps them.

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
/// Changes owner and group as far as this process may change them. If the group cannot be set, group and others get no
/// rights. Throws Error(io | not_found).
void set_rights(const std::string& path, const Rights& rights);

}  // namespace muster::os

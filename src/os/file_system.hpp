// SPDX-License-Identifier: Apache-2.0
#pragma once
// What kind of file system a path lies on.

#include <cstdint>
#include <string>

#include "src/os/fd.hpp"

namespace muster::os {

struct FileSystem {
  std::string type;         ///< "nfs", "ext4"; "0x..." where it has no name here
  bool is_network = false;  ///< other hosts write to it: caches may show old directories and old bytes, and a mapping
                            ///< may end in SIGBUS. FUSE, and what has no name here, count as one.
  std::uint64_t free_bytes = 0;  ///< for this user
};

/// Throws Error(not_found | io).
FileSystem file_system_of(const std::string& path);
/// Of an open file, which messages call `path`.
FileSystem file_system_of(const Fd& file, const std::string& path);

}  // namespace muster::os

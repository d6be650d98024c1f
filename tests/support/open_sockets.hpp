// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <system_error>

namespace muster::test {

/// Returns the number of sockets that this process has.
inline std::size_t open_sockets() {
  std::size_t sockets = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    sockets += std::filesystem::read_symlink(entry, none).string().starts_with("socket:") ? 1 : 0;
  }
  return sockets;
}

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#include "src/os/rights.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "src/os/fault.hpp"
#include "src/os/fd.hpp"

namespace muster::os {

std::optional<Rights> rights_of(const std::string& path) {
  struct stat status {};
  if (try_call("stat", path, [&] { return ::lstat(path.c_str(), &status); }) == 0)
    return Rights{status.st_mode & 07777U, status.st_uid, status.st_gid};
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw errno_error("reading the owner and mode of", errno, path);
}

void set_rights(const std::string& path, const Rights& rights) {
  const std::optional<Rights> now = rights_of(path);
  std::uint32_t mode = rights.mode;
  const auto give = [&](std::uint32_t owner) {
    return try_call("chown", path, [&] { return ::lchown(path.c_str(), owner, rights.group); }) == 0;
  };
  const bool differs = now && (now->owner != rights.owner || now->group != rights.group);
  if (differs && !give(rights.owner) && now->group != rights.group && !give(static_cast<std::uint32_t>(-1)))
    mode &= ~static_cast<std::uint32_t>(S_IRWXG | S_IRWXO | S_ISGID);
  if (now && !differs && now->mode == mode) return;
  // Some file systems have no modes.
  if (try_call("chmod", path, [&] { return ::chmod(path.c_str(), mode); }) != 0 && errno != EPERM &&
      errno != EOPNOTSUPP && errno != ENOSYS)
    throw errno_error("setting the mode of", errno, path);
}

}  // namespace muster::os

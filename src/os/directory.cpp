// SPDX-License-Identifier: Apache-2.0
#include "src/os/directory.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <optional>
#include <string_view>

#include "src/os/small_file.hpp"
#include "src/os/system_call.hpp"

namespace muster::os {
namespace {

[[noreturn]] void refuse_taken(const std::string& path) {
  throw Error(ErrorKind::argument, fmt::format("\"{}\" exists already", path), {.path = path, .os_error = EEXIST});
}

}  // namespace

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void make_directory(const std::string& path) {
  if (try_call("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }) == 0) return;
  if (errno == EEXIST) refuse_taken(path);
  throw errno_error("making the directory", errno, path);
}

Fd open_directory(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw errno_error("opening the directory", errno, path);
  return fd;
}

bool try_lock(const Fd& directory) noexcept {
  return ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0;
}

void sync_file(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd || try_call("fsync", path, [&] { return ::fsync(fd.get()); }) != 0) {
    throw errno_error("writing to the disk", errno, path);
  }
}

void sync_directory(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // One may write to a directory that one may not list, and then cannot sync it.
  if (!fd && errno == EACCES) return;
  if (!fd) throw errno_error("opening the directory", errno, path);
  // Some file systems have nothing to sync in a directory and say so.
  if (try_call("fsync", path, [&] { return ::fsync(fd.get()); }) != 0 && errno != EINVAL && errno != EROFS) {
    throw errno_error("writing to the disk the directory", errno, path);
  }
}

void rename_to_new(const std::string& from, const std::string& to) {
  const std::optional<FileStatus> ours = file_status(from);
  if (try_call("rename", to,
               [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE); }) == 0) {
    return;
  }
  if (errno == EINVAL || errno == ENOSYS) {
    // No such flag here (NFS): rename replaces nothing but an empty directory.
    struct stat status {};
    if (::lstat(to.c_str(), &status) == 0) refuse_taken(to);
    if (try_call("plain-rename", to, [&] { return ::rename(from.c_str(), to.c_str()); }) == 0) return;
  }
  // A server that answered twice may have renamed at the first time and found nothing at the second.
  const int error = errno;
  const std::optional<FileStatus> there = file_status(to);
  if (ours && there && there->identity == ours->identity && !file_status(from)) return;
  errno = error;
  if (errno == EEXIST || errno == ENOTEMPTY) refuse_taken(to);
  throw errno_error(fmt::format("renaming {} to", from), errno, to);
}

bool exchange_names(const std::string& a, const std::string& b) {
  if (try_call("exchange", b, [&] { return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE); }) ==
      0)
    return true;
  if (errno == EINVAL || errno == ENOSYS) return false;
  throw errno_error(fmt::format("exchanging {} and", a), errno, b);
}

}  // namespace muster::os

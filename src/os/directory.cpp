// SPDX-License-Identifier: Apache-2.0
#include "src/os/directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string_view>

#include "src/os/fault.hpp"

namespace muster::os {
namespace {

FileStatus status_of(const struct stat& status) {
  const auto since = std::chrono::seconds(status.st_mtim.tv_sec) + std::chrono::nanoseconds(status.st_mtim.tv_nsec);
  FileStatus facts;
  facts.bytes = static_cast<std::uint64_t>(status.st_size);
  facts.changed =
      std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(since));
  facts.identity = {status.st_dev, status.st_ino};
  facts.is_directory = S_ISDIR(status.st_mode);
  facts.is_regular = S_ISREG(status.st_mode);
  facts.is_link = S_ISLNK(status.st_mode);
  return facts;
}

struct CloseDirectory {
  void operator()(DIR* directory) const noexcept { ::closedir(directory); }
};

}  // namespace

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::vector<DirectoryEntry> list_directory(const std::string& path) {
  const int opened =
      try_call("opendir", path, [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (opened < 0) throw errno_error("opening the directory", errno, path);
  Fd fd(opened);
  const std::unique_ptr<DIR, CloseDirectory> directory(::fdopendir(fd.get()));
  if (!directory) throw errno_error("opening the directory", errno, path);
  fd.release();
  std::vector<DirectoryEntry> entries;
  for (;;) {
    if (const int injected = fault("readdir", path); injected > 0)
      throw errno_error("listing the directory", injected, path);
    errno = 0;
    const dirent* entry = ::readdir(directory.get());  // NOLINT(concurrency-mt-unsafe): a stream of our own
    if (entry == nullptr) {
      if (errno == EINTR) continue;
      if (errno != 0) throw errno_error("listing the directory", errno, path);
      return entries;
    }
    const std::string_view name = static_cast<const char*>(entry->d_name);
    if (name == "." || name == "..") continue;
    bool is_directory = entry->d_type == DT_DIR;
    if (entry->d_type == DT_UNKNOWN) {
      struct stat status {};
      is_directory = ::fstatat(::dirfd(directory.get()), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                     S_ISDIR(status.st_mode);
    }
    entries.push_back({std::string(name), is_directory});
  }
}

std::optional<FileStatus> file_status(const std::string& path, Links links) {
  struct stat status {};
  const int flags = links == Links::themselves ? AT_SYMLINK_NOFOLLOW : 0;
  if (try_call("stat", path, [&] { return ::fstatat(AT_FDCWD, path.c_str(), &status, flags); }) == 0)
    return status_of(status);
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw errno_error("asking about", errno, path);
}

void rename_file(const std::string& from, const std::string& to) {
  if (try_call("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); }) != 0)
    throw errno_error(fmt::format("renaming {} to", from), errno, to);
}

bool remove_file(const std::string& path) {
  if (try_call("unlink", path, [&] { return ::unlink(path.c_str()); }) == 0) return true;
  if (errno == ENOENT) return false;
  throw errno_error("removing", errno, path);
}

bool remove_empty_directory(const std::string& path) {
  if (try_call("rmdir", path, [&] { return ::rmdir(path.c_str()); }) == 0) return true;
  if (errno == ENOENT || errno == ENOTEMPTY || errno == EEXIST) return false;
  throw errno_error("removing the directory", errno, path);
}

bool make_directory(const std::string& path) {
  if (try_call("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }) == 0) return true;
  if (errno == EEXIST) return false;
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
  const Fd fd(
      try_call("open-directory", path, [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  // One may write to a directory that one may not list, and then cannot sync it.
  if (!fd && errno == EACCES) return;
  if (!fd) throw errno_error("opening the directory", errno, path);
  // Some file systems have nothing to sync in a directory and say so.
  if (try_call("fsync-directory", path, [&] { return ::fsync(fd.get()); }) != 0 && errno != EINVAL && errno != EROFS)
    throw errno_error("writing the directory to the disk", errno, path);
}

}  // namespace muster::os

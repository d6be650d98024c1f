// SPDX-License-Identifier: Apache-2.0
#include "src/os/directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string_view>

#include "src/base/escaped.hpp"
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

struct KnownFileSystem {
  std::uint32_t magic;
  const char* type;
  bool is_network;
};

// The numbers are from statfs(2) and from the sources of the file systems.
constexpr std::array<KnownFileSystem, 33> known = {{
    {0x6969, "nfs", true},          {0xff534d42, "cifs", true},   {0xfe534d42, "smb2", true},
    {0x517b, "smb", true},          {0x65735546, "fuse", true},   {0x01021997, "9p", true},
    {0x0bd00bd0, "lustre", true},   {0x47504653, "gpfs", true},   {0x00c36400, "ceph", true},
    {0x5346414f, "afs", true},      {0x73757245, "coda", true},   {0x7461636f, "ocfs2", true},
    {0x01161970, "gfs2", true},     {0x19830326, "beegfs", true}, {0xaad7aaea, "panfs", true},
    {0x20030528, "orangefs", true}, {0x786f4256, "vboxsf", true}, {0xef53, "ext4", false},
    {0x58465342, "xfs", false},     {0x9123683e, "btrfs", false}, {0xf2f52010, "f2fs", false},
    {0x2fc12fc1, "zfs", false},     {0x01021994, "tmpfs", false}, {0x858458f6, "ramfs", false},
    {0x794c7630, "overlay", false}, {0x4d44, "vfat", false},      {0x73717368, "squashfs", false},
    {0xe0f5e1e2, "erofs", false},   {0x9660, "iso9660", false},   {0xca451a4e, "bcachefs", false},
    {0x2011bab0, "exfat", false},   {0x3153464a, "jfs", false},   {0x3434, "nilfs2", false},
}};

template <class Ask>
FileSystem describe(const std::string& path, const Ask& ask) {
  struct statfs status {};
  if (try_call("statfs", path, [&] { return ask(&status); }) != 0)
    throw errno_error("reading the file system type", errno, path);
  FileSystem system;
  const auto magic = static_cast<std::uint32_t>(status.f_type);
  const auto* found = std::ranges::find(known, magic, &KnownFileSystem::magic);
  system.type = found == known.end() ? fmt::format("{:#x}", magic) : found->type;
  system.is_network = found == known.end() || found->is_network;
  return system;
}

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
    const dirent* entry = ::readdir(directory.get());  // NOLINT(concurrency-mt-unsafe): not a shared stream
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
  throw errno_error("reading the status", errno, path);
}

void rename_file(const std::string& from, const std::string& to) {
  if (try_call("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); }) != 0)
    throw errno_error(fmt::format("renaming {} to this name", in_quotes(from)), errno, to);
}

bool link_file(const std::string& from, const std::string& to) {
  if (try_call("link", to, [&] { return ::link(from.c_str(), to.c_str()); }) == 0) return true;
  if (errno == EPERM || errno == EACCES || errno == EMLINK || errno == EOPNOTSUPP || errno == ENOSYS || errno == EXDEV)
    return false;
  throw errno_error(fmt::format("linking {} to this name", in_quotes(from)), errno, to);
}

bool is_mount_point(const std::string& path) {
  const auto status_at = [](const std::string& name) {
    struct statx status {};
    const auto ask = [&] { return ::statx(AT_FDCWD, name.c_str(), AT_SYMLINK_NOFOLLOW, STATX_INO, &status); };
    if (try_call("statx", name, ask) != 0) throw errno_error("reading the status", errno, name);
    return status;
  };
  const struct statx status = status_at(path);
  // From Linux 5.8 on, the kernel knows. Before that, a bind mount within a file system stays unnoticed.
  if ((status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  const struct statx above = status_at(path + "/..");
  return status.stx_dev_major != above.stx_dev_major || status.stx_dev_minor != above.stx_dev_minor ||
         status.stx_ino == above.stx_ino;
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
  throw errno_error("creating the directory", errno, path);
}

bool make_own_directory(const std::string& path) {
  if (try_call("mkdir", path, [&] { return ::mkdir(path.c_str(), 0700); }) != 0 && errno != EEXIST)
    throw errno_error("creating the directory", errno, path);
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) throw errno_error("reading the status", errno, path);
  return S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & 077U) == 0;
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
    throw errno_error("syncing the file to disk", errno, path);
  }
}

void sync_directory(const std::string& path) {
  const Fd fd(
      try_call("open-directory", path, [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  // A process may be allowed to write to a directory but not to list it; then it cannot sync the directory.
  if (!fd && errno == EACCES) return;
  if (!fd) throw errno_error("opening the directory", errno, path);
  // Some file systems cannot sync directories and return an error.
  if (try_call("fsync-directory", path, [&] { return ::fsync(fd.get()); }) != 0 && errno != EINVAL && errno != EROFS)
    throw errno_error("syncing the directory to disk", errno, path);
}

FileSystem file_system_of(const std::string& path) {
  return describe(path, [&](struct statfs* status) { return ::statfs(path.c_str(), status); });
}

FileSystem file_system_of(const Fd& file, const std::string& path) {
  return describe(path, [&](struct statfs* status) { return ::fstatfs(file.get(), status); });
}

std::optional<SpaceFacts> space_facts(const std::string& path) noexcept {
  struct statvfs system {};
  if (::statvfs(path.c_str(), &system) != 0) return std::nullopt;
  const std::uint64_t unit = system.f_frsize;
  return SpaceFacts{system.f_blocks * unit, system.f_bavail * unit, system.f_files, system.f_favail};
}

}  // namespace muster::os

// SPDX-License-Identifier: Apache-2.0
#include "src/os/small_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>

#include "src/os/fault.hpp"
#include "src/os/fd.hpp"
#include "src/os/file.hpp"
#include "src/os/system_call.hpp"

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

std::vector<std::byte> read_small_file(const std::string& path, std::uint64_t most) {
  // O_NONBLOCK: a pipe of that name must not hold us up.
  const Fd fd(try_call("open", path, [&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));
  if (!fd) throw errno_error("opening", errno, path);
  struct stat status {};
  if (try_call("fstat", path, [&] { return ::fstat(fd.get(), &status); }) != 0)
    throw errno_error("asking for the size of", errno, path);
  if (!S_ISREG(status.st_mode))
    throw Error(ErrorKind::corrupt, fmt::format("reading {}: it is no regular file", path), {.path = path});
  // One byte more than what is there: that it ends is seen by the same read.
  const std::uint64_t size = std::min<std::uint64_t>(static_cast<std::uint64_t>(status.st_size), most) + 1;
  std::vector<std::byte> bytes(size);
  std::uint64_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = try_call("pread", path, [&] {
      return ::pread(fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    });
    if (got < 0) throw errno_error("reading", errno, path);
    if (got == 0) break;
    done += static_cast<std::uint64_t>(got);
  }
  if (done > most)
    throw Error(ErrorKind::corrupt, fmt::format("reading {}: it has more than {} bytes", path, most), {.path = path});
  bytes.resize(done);
  return bytes;
}

FileIdentity write_new_file(const std::string& path, std::span<const std::byte> bytes, Durability durability) {
  WritableFile file = WritableFile::create(path, path);
  try {
    file.write_at(0, bytes);
    if (durability == Durability::synced) file.sync();
    const FileIdentity identity = file.identity();
    file.close();
    return identity;
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

void rename_file(const std::string& from, const std::string& to) {
  if (try_call("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); }) != 0)
    throw errno_error(fmt::format("renaming {} to", from), errno, to);
}

bool link_file(const std::string& from, const std::string& to) {
  if (try_call("link", to, [&] { return ::link(from.c_str(), to.c_str()); }) == 0) return true;
  if (errno == EEXIST) return false;
  if (errno == EPERM || errno == EMLINK || errno == EOPNOTSUPP || errno == ENOSYS)
    throw errno_error(ErrorKind::unsupported, "making a second name", errno, to);
  throw errno_error("making a second name", errno, to);
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

bool make_directory_if_absent(const std::string& path) {
  if (try_call("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }) == 0) return true;
  if (errno == EEXIST) return false;
  throw errno_error("making the directory", errno, path);
}

}  // namespace muster::os

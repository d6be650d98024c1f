// SPDX-License-Identifier: Apache-2.0
// faulty_fs BACKING MOUNTPOINT [RULE...]: mounts a directory with the faults of a network file system or a bad disk.
// Two mounts of one directory act like two hosts. It runs in the foreground until it is unmounted or gets SIGTERM.
//
//   fail=OP:ERRNO:FIRST:COUNT[:PART]  calls FIRST to FIRST+COUNT-1 (from 0) of OP on paths that contain PART fail;
//                                     OP: create open read write fsync flush rename unlink link readdir getattr
//   space=BYTES                       total bytes that may be written, then ENOSPC
//   late=MS                           younger names do not exist yet: they are neither listed nor found
//   old=MS                            younger files have their earlier bytes: zeros
//   short=MS                          younger files have only their first half
//   listing=MS                        a directory that was listed keeps its names for this time, like in a client's
//                                     cache, or until this mount changes a directory
//   absent=MS                         a name that was not found stays missing for this time, like in a client's cache
//
// SIGUSR1 is a power failure: bytes that were not fsynced become zeros, and names remain.

#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace {

struct FailRule {
  std::string op;
  int error = 0;
  long first = 0;
  long count = 0;
  std::string part;
  long seen = 0;
};

struct Unsynced {
  int fd = -1;  // open until the bytes are safe or lost
  std::vector<std::pair<off_t, size_t>> extents;
};

std::string backing;
std::vector<FailRule> rules;
long long space_left = -1;
double late_ms = 0;
double old_ms = 0;
double short_ms = 0;
double absent_ms = 0;
std::chrono::duration<double, std::milli> listing_time{0};
struct Listing {
  std::chrono::steady_clock::time_point read;
  std::vector<std::string> names;
};
std::map<std::string, Listing> listings;
std::map<ino_t, Unsynced> unsynced;  // the file system runs on one thread
std::set<ino_t> own_files;           // files created or renamed through this mount: a host sees its own changes at once
std::atomic<bool> power_cut{false};

std::string real(const char* path) {
  return backing + path;
}

int errno_of(const std::string& name) {
  for (int error = 1; error < 134; ++error)
    if (const char* known = ::strerrorname_np(error); known != nullptr && name == known) return error;
  return EIO;
}

/// Returns 0, or minus the errno with which this call must fail.
int injected(std::string_view op, const char* name) {
  // A file that was removed while it is open has no path.
  const std::string_view path = name == nullptr ? "" : name;
  for (FailRule& rule : rules) {
    if (rule.op != op || path.find(rule.part) == std::string_view::npos) continue;
    const long count = rule.seen++;
    if (count >= rule.first && count < rule.first + rule.count) return -rule.error;
  }
  return 0;
}

int result(int value) {
  return value < 0 ? -errno : 0;
}

/// Returns the time since the file got this name or was last changed.
double age_ms(const struct stat& status) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return 1e3 * static_cast<double>(now.tv_sec - status.st_ctim.tv_sec) +
         1e-6 * static_cast<double>(now.tv_nsec - status.st_ctim.tv_nsec);
}

/// Returns whether a file belongs to another host and is so new that a rule with this delay applies to it.
bool is_fresh(const struct stat& status, double milliseconds) {
  return milliseconds > 0 && S_ISREG(status.st_mode) && !own_files.contains(status.st_ino) &&
         age_ms(status) < milliseconds;
}

bool is_hidden(const struct stat& status) {
  return is_fresh(status, late_ms);
}

void remember_own(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) own_files.insert(status.st_ino);
}

void lose_unsynced() {
  for (auto& [inode, file] : unsynced) {
    for (const auto& [offset, bytes] : file.extents) {
      const std::vector<char> zeros(bytes);
      if (::pwrite(file.fd, zeros.data(), bytes, offset) < 0) std::perror("faulty_fs: losing");
    }
    ::close(file.fd);
  }
  unsynced.clear();
}

void make_safe(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return;
  const auto found = unsynced.find(status.st_ino);
  if (found == unsynced.end()) return;
  ::close(found->second.fd);
  unsynced.erase(found);
}

int do_getattr(const char* path, struct stat* status, fuse_file_info*) {
  if (power_cut.exchange(false)) lose_unsynced();
  if (const int error = injected("getattr", path)) return error;
  if (::lstat(real(path).c_str(), status) != 0) return -errno;
  if (is_hidden(*status)) return -ENOENT;
  if (is_fresh(*status, short_ms)) status->st_size /= 2;
  return 0;
}

int do_readdir(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*, fuse_readdir_flags) {
  if (const int error = injected("readdir", path)) return error;
  const auto now = std::chrono::steady_clock::now();
  Listing& listing = listings[path];
  if (listing.names.empty() || now - listing.read >= listing_time) {
    listing = {now, {}};
    DIR* directory = ::opendir(real(path).c_str());
    if (directory == nullptr) return -errno;
    while (const dirent* entry = ::readdir(directory)) {
      struct stat status {};
      const bool is_there = ::fstatat(::dirfd(directory), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0;
      if (is_there && !is_hidden(status)) listing.names.emplace_back(entry->d_name);
    }
    ::closedir(directory);
  }
  for (const std::string& name : listing.names) fill(buffer, name.c_str(), nullptr, 0, fuse_fill_dir_flags{});
  return 0;
}

int do_create(const char* path, mode_t mode, fuse_file_info* info) {
  if (const int error = injected("create", path)) return error;
  const int fd = ::open(real(path).c_str(), info->flags | O_CREAT, mode);
  if (fd < 0) return -errno;
  info->fh = static_cast<std::uint64_t>(fd);
  remember_own(real(path));
  listings.clear();
  return 0;
}

int do_open(const char* path, fuse_file_info* info) {
  if (const int error = injected("open", path)) return error;
  const int fd = ::open(real(path).c_str(), info->flags);
  if (fd < 0) return -errno;
  info->fh = static_cast<std::uint64_t>(fd);
  return 0;
}

int do_read(const char* path, char* buffer, size_t bytes, off_t offset, fuse_file_info* info) {
  if (const int error = injected("read", path)) return error;
  const auto fd = static_cast<int>(info->fh);
  const ssize_t got = ::pread(fd, buffer, bytes, offset);
  if (got < 0) return -errno;
  struct stat status {};
  if (::fstat(fd, &status) == 0 && is_fresh(status, old_ms)) ::memset(buffer, 0, static_cast<size_t>(got));
  return static_cast<int>(got);
}

int do_write(const char* path, const char* buffer, size_t bytes, off_t offset, fuse_file_info* info) {
  if (const int error = injected("write", path)) return error;
  if (space_left >= 0 && static_cast<long long>(bytes) > space_left) return -ENOSPC;
  const auto fd = static_cast<int>(info->fh);
  const ssize_t done = ::pwrite(fd, buffer, bytes, offset);
  if (done < 0) return -errno;
  if (space_left >= 0) space_left -= done;
  struct stat status {};
  if (::fstat(fd, &status) == 0) {
    Unsynced& file = unsynced[status.st_ino];
    // The call's descriptor may be only for appending or reading.
    if (file.fd < 0) file.fd = ::open(real(path).c_str(), O_WRONLY | O_CLOEXEC);
    file.extents.emplace_back(offset, static_cast<size_t>(done));
  }
  return static_cast<int>(done);
}

int do_fsync(const char* path, int, fuse_file_info* info) {
  if (const int error = injected("fsync", path)) return error;
  make_safe(static_cast<int>(info->fh));
  return result(::fdatasync(static_cast<int>(info->fh)));
}

int do_flush(const char* path, fuse_file_info*) {
  return injected("flush", path);
}

int do_release(const char*, fuse_file_info* info) {
  return result(::close(static_cast<int>(info->fh)));
}

int do_rename(const char* from, const char* to, unsigned flags) {
  if (const int error = injected("rename", to)) return error;
  remember_own(real(from));
  listings.clear();
  return result(::renameat2(AT_FDCWD, real(from).c_str(), AT_FDCWD, real(to).c_str(), flags));
}

int do_link(const char* from, const char* to) {
  if (const int error = injected("link", to)) return error;
  listings.clear();
  return result(::link(real(from).c_str(), real(to).c_str()));
}

int do_unlink(const char* path) {
  if (const int error = injected("unlink", path)) return error;
  listings.clear();
  // The next file may get the same inode number.
  struct stat status {};
  if (::lstat(real(path).c_str(), &status) == 0) own_files.erase(status.st_ino);
  return result(::unlink(real(path).c_str()));
}

int do_mkdir(const char* path, mode_t mode) {
  return result(::mkdir(real(path).c_str(), mode));
}
int do_rmdir(const char* path) {
  return result(::rmdir(real(path).c_str()));
}
int do_truncate(const char* path, off_t length, fuse_file_info*) {
  return result(::truncate(real(path).c_str(), length));
}
int do_statfs(const char*, struct statvfs* status) {
  return result(::statvfs(backing.c_str(), status));
}
int do_fsyncdir(const char*, int, fuse_file_info*) {
  return 0;
}

void* do_init(fuse_conn_info*, fuse_config* config) {
  // The kernel caches nothing except missing names, if a rule requires that.
  config->entry_timeout = 0;
  config->attr_timeout = 0;
  config->negative_timeout = absent_ms / 1e3;
  config->direct_io = 0;
  config->nullpath_ok = 0;
  config->hard_remove = 1;
  config->use_ino = 1;
  return nullptr;
}

bool take_rule(const std::string& text) {
  const auto value = [&](std::string_view key) { return std::atof(text.c_str() + key.size()); };
  if (text.starts_with("space=")) {
    space_left = static_cast<long long>(value("space="));
  } else if (text.starts_with("late=")) {
    late_ms = value("late=");
  } else if (text.starts_with("old=")) {
    old_ms = value("old=");
  } else if (text.starts_with("short=")) {
    short_ms = value("short=");
  } else if (text.starts_with("listing=")) {
    listing_time = decltype(listing_time)(value("listing="));
  } else if (text.starts_with("absent=")) {
    absent_ms = value("absent=");
  } else if (text.starts_with("fail=")) {
    std::vector<std::string> fields(1);
    for (const char letter : text.substr(5))
      if (letter == ':')
        fields.emplace_back();
      else
        fields.back() += letter;
    if (fields.size() < 4) return false;
    rules.push_back({fields[0], errno_of(fields[1]), std::atol(fields[2].c_str()), std::atol(fields[3].c_str()),
                     fields.size() > 4 ? fields[4] : std::string(), 0});
  } else {
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "faulty_fs BACKING MOUNTPOINT [RULE...]\n");
    return 2;
  }
  backing = argv[1];
  for (int i = 3; i < argc; ++i)
    if (!take_rule(argv[i])) {
      std::fprintf(stderr, "faulty_fs: no such rule: %s\n", argv[i]);
      return 2;
    }
  struct sigaction cut {};
  cut.sa_handler = [](int) { power_cut = true; };
  ::sigaction(SIGUSR1, &cut, nullptr);
  fuse_operations operations{};
  operations.getattr = do_getattr;
  operations.readdir = do_readdir;
  operations.create = do_create;
  operations.open = do_open;
  operations.read = do_read;
  operations.write = do_write;
  operations.fsync = do_fsync;
  operations.flush = do_flush;
  operations.release = do_release;
  operations.rename = do_rename;
  operations.link = do_link;
  operations.unlink = do_unlink;
  operations.mkdir = do_mkdir;
  operations.rmdir = do_rmdir;
  operations.truncate = do_truncate;
  operations.statfs = do_statfs;
  operations.fsyncdir = do_fsyncdir;
  operations.init = do_init;
  char* arguments[] = {argv[0], argv[2], const_cast<char*>("-f"), const_cast<char*>("-s")};
  return fuse_main(4, arguments, &operations, nullptr);
}

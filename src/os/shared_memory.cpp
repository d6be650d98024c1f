// SPDX-License-Identifier: Apache-2.0
#include "src/os/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/interprocess/exceptions.hpp>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/os/directory.hpp"
#include "src/os/fault.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace muster::os {
namespace {

constexpr const char* posix_mount = "/dev/shm";
constexpr std::string_view seam_path = "shared memory";  // for fault.hpp

/// Returns whether the last call failed because a resource was short that other processes may free, not because the
/// machine does not support the call.
bool is_short() noexcept {
  return errno == EMFILE || errno == ENFILE || errno == ENOMEM;
}

Fd create_anonymous(std::uint64_t bytes) {
  Fd memory(
      try_call("memfd_create", seam_path, [] { return ::memfd_create("muster", MFD_CLOEXEC | MFD_ALLOW_SEALING); }));
  if (!memory && is_short()) throw errno_error("shared memory: memfd_create");
  if (!memory)
    throw with_remedy(errno_error(ErrorKind::unsupported, "shared memory: memfd_create"),
                      "Set MUSTER_SHM=posix to use /dev/shm");
  if (try_call("ftruncate", seam_path, [&] { return ::ftruncate(memory.get(), static_cast<off_t>(bytes)); }) != 0)
    throw errno_error(ErrorKind::out_of_space, "shared memory: creating " + byte_text(bytes));
  // The seals keep every holder of the descriptor from shrinking the memory, which would cause SIGBUS in processes that
  // have mapped it.
  constexpr int seals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
  if (try_call("fcntl", seam_path, [&] { return ::fcntl(memory.get(), F_ADD_SEALS, seals); }) != 0)
    throw errno_error("shared memory: sealing");
  return memory;
}

Fd create_posix(std::uint64_t bytes) {
  // A file that never has a name cannot be left behind if a process is killed.
  Fd memory(
      try_call("open", seam_path, [] { return ::open(posix_mount, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600); }));
  if (!memory) {
    // Not every file system supports O_TMPFILE. Without it, the file has a name between two calls.
    const std::string name = "/muster-" + random_hex(16);
    memory = Fd(try_call("shm_open", seam_path,
                         [&] { return ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600); }));
    if (!memory && is_short()) throw errno_error("creating POSIX shared memory", errno, posix_mount);
    if (!memory) throw errno_error(ErrorKind::unsupported, "creating POSIX shared memory", errno, posix_mount);
    ::shm_unlink(name.c_str());
  }
  if (try_call("ftruncate", seam_path, [&] { return ::ftruncate(memory.get(), static_cast<off_t>(bytes)); }) != 0)
    throw errno == EFBIG
        ? with_remedy(
              errno_error(ErrorKind::unsupported, "setting the length of POSIX shared memory", errno, posix_mount),
              "Mount a tmpfs there, or unset MUSTER_SHM")
        : errno_error(ErrorKind::out_of_space, "setting the length of POSIX shared memory", errno, posix_mount);
  return memory;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// Parses lines of the form `key value` (memory.stat, meminfo).
std::uint64_t read_keyed(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t value = 0;
  std::string rest;
  while (file >> name >> value) {
    if (name == key) return value;
    std::getline(file, rest);
  }
  return 0;
}

std::uint64_t left_under(std::uint64_t limit, std::uint64_t used, std::uint64_t reclaimable) {
  const std::uint64_t kept = used - std::min(used, reclaimable);
  return limit - std::min(limit, kept);
}

// Returns the smallest headroom of this process's cgroup and its parents, for cgroup versions 1 and 2. The page cache
// of files counts as free, because the kernel drops it first.
std::uint64_t cgroup_headroom() {
  std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::string path = line.substr(second + 1);
    for (;;) {
      const std::string dir = root + (path == "/" ? "" : path);
      const auto limit = read_number(dir + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
      const auto used = read_number(dir + (unified ? "/memory.current" : "/memory.usage_in_bytes"));
      if (limit && used) {
        const std::string stat = dir + "/memory.stat";
        const std::uint64_t files =
            unified ? read_keyed(stat, "inactive_file") + read_keyed(stat, "active_file")
                    : read_keyed(stat, "total_inactive_file") + read_keyed(stat, "total_active_file");
        best = std::min(best, left_under(*limit, *used, files));
      }
      if (path.empty() || path == "/") break;
      const auto slash = path.rfind('/');
      path = slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
    }
  }
  return best;
}

}  // namespace

Backing default_backing() {
  if (const auto forced = environment("MUSTER_SHM")) {
    if (*forced == "memfd") return Backing::anonymous;
    if (*forced == "posix") return Backing::posix;
    throw Error(ErrorKind::invalid_argument, "MUSTER_SHM is " + in_quotes(*forced) + ": it must be memfd or posix");
  }
  static const bool have_memfd = [] { return bool(Fd(::memfd_create("muster-probe", MFD_CLOEXEC))); }();
  return have_memfd ? Backing::anonymous : Backing::posix;
}

Fd create_shared_memory(std::uint64_t bytes, Backing backing) {
  return backing == Backing::anonymous ? create_anonymous(bytes) : create_posix(bytes);
}

std::uint64_t shared_memory_size(const Fd& memory) {
  struct stat status {};
  if (try_call("fstat", seam_path, [&] { return ::fstat(memory.get(), &status); }) != 0)
    throw errno_error("shared memory: reading the size");
  return static_cast<std::uint64_t>(status.st_size);
}

std::vector<std::byte> beginning_of_shared_memory(const std::string& descriptor, std::size_t bytes) {
  std::array<char, 64> link{};
  const ssize_t length = ::readlink(descriptor.c_str(), link.data(), link.size());
  const std::string_view name(link.data(), length < 0 ? 0 : static_cast<std::size_t>(length));
  if (!name.starts_with("/memfd:muster ") && !name.starts_with(std::string(posix_mount) + "/")) return {};
  const Fd memory(::open(descriptor.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  std::vector<std::byte> beginning(bytes);
  if (!memory || ::pread(memory.get(), beginning.data(), bytes, 0) != static_cast<ssize_t>(bytes)) return {};
  return beginning;
}

void punch_hole(const Fd& memory, std::uint64_t offset, std::uint64_t bytes) noexcept {
  if (bytes != 0)
    ::fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes));
}

void reserve(const Fd& memory, std::uint64_t offset, std::uint64_t bytes) {
  // In pieces: a signal may undo a call, and a profiler's timer signals every few milliseconds.
  constexpr std::uint64_t piece = 4 << 20;
  const FileSizeAsError no_signal;
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t length = std::min(piece, bytes - done);
    const int status =
        is_faulty("fallocate", seam_path)
            ? errno
            : ::posix_fallocate(memory.get(), static_cast<off_t>(offset + done), static_cast<off_t>(length));
    if (status == EINTR) continue;
    if (status == 0) {
      done += length;
      continue;
    }
    punch_hole(memory, offset, done);
    const std::string what = "shared memory: reserving " + byte_text(bytes);
    if (default_backing() == Backing::anonymous) throw errno_error(ErrorKind::out_of_space, what, status);
    throw errno_error(ErrorKind::out_of_space, what, status, posix_mount);
  }
}

void write_at(const Fd& file, std::uint64_t offset, std::span<const std::byte> bytes) {
  const FileSizeAsError no_signal;
  while (!bytes.empty()) {
    const ssize_t written = try_call("pwrite", seam_path, [&] {
      return ::pwrite(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    });
    if (written < 0) throw errno_error("shared memory: writing");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

const char* to_string(MemoryLimit limit) noexcept {
  if (limit == MemoryLimit::cgroup) return "the cgroup's memory limit";
  return limit == MemoryLimit::mount ? posix_mount : "MemAvailable";
}

MemoryFacts memory_facts() {
  const char* const file = "/proc/meminfo";
  return {read_keyed(file, "MemTotal:") * 1024, read_keyed(file, "MemAvailable:") * 1024};
}

MemoryHeadroom memory_headroom(Backing backing) {
  MemoryHeadroom room{memory_facts().available_bytes, MemoryLimit::machine};
  if (room.bytes == 0) room.bytes = std::numeric_limits<std::uint64_t>::max();
  if (const std::uint64_t group = cgroup_headroom(); group < room.bytes) room = {group, MemoryLimit::cgroup};
  if (backing == Backing::posix) {
    const std::optional<SpaceFacts> mount = space_facts(posix_mount);
    if (mount && mount->free_bytes < room.bytes) room = {mount->free_bytes, MemoryLimit::mount};
  }
  return room;
}

std::uint64_t largest_file() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::numeric_limits<std::int64_t>::max();
  return limit.rlim_cur;
}

Mapping::Mapping(const Fd& memory, Access access, std::uint64_t offset, std::uint64_t bytes) {
  namespace bi = boost::interprocess;
  // Boost maps any object that returns its handle and mode.
  struct Mappable {
    int fd;
    bi::mode_t mode;
    [[nodiscard]] bi::mapping_handle_t get_mapping_handle() const {
      return bi::ipcdetail::mapping_handle_from_file_handle(fd);
    }
    [[nodiscard]] bi::mode_t get_mode() const { return mode; }
  };
  const bi::mode_t mode = access == Access::read_only ? bi::read_only : bi::read_write;
  if (is_faulty("mmap", seam_path)) throw errno_error("shared memory: mapping");
  try {
    region_ = bi::mapped_region(Mappable{memory.get(), bi::read_write}, mode, static_cast<bi::offset_t>(offset), bytes);
  } catch (const bi::interprocess_exception& error) {
    throw with_remedy(
        errno_error(ErrorKind::out_of_space, "shared memory: mapping " + byte_text(bytes), error.get_native_error()),
        "Raise the limits of memory (ulimit -v, vm.max_map_count)");
  }
}

void Mapping::populate(Access access, std::uint64_t offset, std::uint64_t bytes) const noexcept {
  if (bytes == 0) return;
  // The range need not begin or end at a page boundary.
  const auto address = reinterpret_cast<std::uintptr_t>(data());
  const AddressRange pages =
      pages_around({address + offset, address + std::min<std::uint64_t>(offset + bytes, size())}, page_size());
  ::madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin,
            access == Access::read_only ? MADV_POPULATE_READ : MADV_POPULATE_WRITE);
}

}  // namespace muster::os

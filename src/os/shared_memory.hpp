// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared memory of the kernel: files without a name, their mappings, and the amount of available memory.

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

/// The source of shared memory.
enum class Backing : std::uint8_t {
  anonymous,  ///< memfd; not counted against /dev/shm
  posix,      ///< a file in the POSIX shared memory mount (/dev/shm), for systems that forbid memfd
};
/// Returns the value of MUSTER_SHM=memfd|posix, else memfd if the kernel supports it. Throws Error(invalid_argument) on
/// another value.
Backing default_backing();

/// Creates shared memory of `bytes` bytes without a name. It is freed with its last descriptor and mapping. Its pages
/// are allocated when they are touched. POSIX memory must be reserved first, so that a full mount causes an error and
/// not SIGBUS. Anonymous memory is sealed against a change of its size. Throws Error(out_of_space | unsupported).
Fd create_shared_memory(std::uint64_t bytes, Backing backing);
/// Returns the size of a shared memory file. Throws Error(io).
std::uint64_t shared_memory_size(const Fd& memory);

/// Returns the first `bytes` bytes of the shared memory behind a descriptor of any process ("/proc/PID/fd/N"). Returns
/// an empty vector if Muster cannot have created that memory.
std::vector<std::byte> beginning_of_shared_memory(const std::string& descriptor, std::size_t bytes);

/// Frees the pages of [offset, offset + bytes), which then read as zero.
void punch_hole(const Fd& memory, std::uint64_t offset, std::uint64_t bytes) noexcept;
/// Allocates memory for [offset, offset + bytes) now. Throws Error(out_of_space).
void reserve(const Fd& memory, std::uint64_t offset, std::uint64_t bytes);
/// Writes all bytes with pwrite, which allocates fresh memory faster than stores to a mapping. Throws
/// Error(out_of_space | io).
void write_at(const Fd& file, std::uint64_t offset, std::span<const std::byte> bytes);

struct MemoryFacts {
  std::uint64_t total_bytes = 0;  ///< of the machine
  std::uint64_t available_bytes = 0;
};
MemoryFacts memory_facts();

/// How much more shared memory the ranks of this host can take together, as far as this process can know. It is the
/// minimum of the machine's available memory, the rest of the cgroup's limit and, for POSIX memory, the free space of
/// the mount.
enum class MemoryLimit : std::uint8_t { machine, cgroup, mount };
/// Returns "MemAvailable", "the cgroup's memory limit" or "/dev/shm".
const char* to_string(MemoryLimit limit) noexcept;
struct MemoryHeadroom {
  std::uint64_t bytes = 0;
  MemoryLimit limit = MemoryLimit::machine;
};
MemoryHeadroom memory_headroom(Backing backing);
/// Returns RLIMIT_FSIZE. Creating a larger file, or writing beyond the limit, ends the process with SIGXFSZ; a store to
/// a mapping does not.
std::uint64_t largest_file() noexcept;

enum class Access : std::uint8_t { read_only, read_write };

/// A mapping of a part of a file. Movable; the destructor unmaps it.
class Mapping {
 public:
  Mapping() = default;
  /// Throws Error(out_of_space) if the address space or the kernel has no room.
  Mapping(const Fd& memory, Access access, std::uint64_t offset, std::uint64_t bytes);

  [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(region_.get_address()); }
  [[nodiscard]] std::size_t size() const noexcept { return region_.get_size(); }
  explicit operator bool() const noexcept { return region_.get_size() != 0; }
  /// Adds existing pages of [offset, offset + bytes) to the page table in one call, which costs a fraction of touching
  /// them. A hint: failure is not an error.
  void populate(Access access, std::uint64_t offset, std::uint64_t bytes) const noexcept;

 private:
  boost::interprocess::mapped_region region_;
};

}  // namespace muster::os

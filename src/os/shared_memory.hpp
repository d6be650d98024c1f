// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared memory as the kernel gives it: files without a name, their mappings, and how much memory there is to have.

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

/// Where shared memory comes from.
enum class Backing : std::uint8_t {
  anonymous,  ///< memfd: not counted against /dev/shm
  posix,      ///< a file of the POSIX shared memory mount (/dev/shm): where memfd is forbidden
};
/// MUSTER_SHM=memfd|posix; else memfd where the kernel gives it. Throws Error(argument) on another value.
Backing default_backing();

/// Memory of `bytes` that nobody can open by a name and that is gone with its last descriptor and mapping. It is taken
/// as it is touched; POSIX memory has to be reserved before, so that a full mount is an error and not a SIGBUS.
/// Anonymous memory is sealed against another size. Throws Error(no_space | unsupported).
Fd create_shared_memory(std::uint64_t bytes, Backing backing);
/// Size of a shared memory file. Throws Error(io).
std::uint64_t shared_memory_size(const Fd& memory);

/// The first `bytes` of what a descriptor of some process stands for ("/proc/PID/fd/N"), where that is shared memory
/// that Muster can have made; else nothing.
std::vector<std::byte> beginning_of_shared_memory(const std::string& descriptor, std::size_t bytes);

/// Gives the pages of [offset, offset + bytes) back; they read as zero after it.
void punch_hole(const Fd& memory, std::uint64_t offset, std::uint64_t bytes) noexcept;
/// Takes memory for [offset, offset + bytes) now. Throws Error(no_space).
void reserve(const Fd& memory, std::uint64_t offset, std::uint64_t bytes);
/// Writes all of it by a call, which takes fresh memory faster than a store to a mapping. Throws Error(no_space | io).
void write_at(const Fd& file, std::uint64_t offset, std::span<const std::byte> bytes);

struct MemoryFacts {
  std::uint64_t total_bytes = 0;  ///< of the machine
  std::uint64_t available_bytes = 0;
};
MemoryFacts memory_facts();

/// How much more shared memory the ranks of this host can take together, as far as this process can know: what the
/// machine has available, what the cgroup still allows, and for POSIX memory what the mount has left.
enum class MemoryLimit : std::uint8_t { machine, cgroup, mount };
/// "MemAvailable", "the cgroup's memory limit", "/dev/shm".
const char* to_string(MemoryLimit limit) noexcept;
struct MemoryHeadroom {
  std::uint64_t bytes = 0;
  MemoryLimit limit = MemoryLimit::machine;
};
MemoryHeadroom memory_headroom(Backing backing);
/// RLIMIT_FSIZE: making a larger file ends the process by SIGXFSZ, and so does writing beyond it, but not a store to
/// a mapping.
std::uint64_t largest_file() noexcept;

enum class Access : std::uint8_t { read_only, read_write };

/// A mapping of a part of a file. Moves, and unmaps.
class Mapping {
 public:
  Mapping() = default;
  /// Throws Error(no_space) if the address space or the kernel has no room.
  Mapping(const Fd& memory, Access access, std::uint64_t offset, std::uint64_t bytes);

  [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(region_.get_address()); }
  [[nodiscard]] std::size_t size() const noexcept { return region_.get_size(); }
  explicit operator bool() const noexcept { return region_.get_size() != 0; }
  /// Puts existing pages of [offset, offset + bytes) into the page table at once, which costs a fraction of touching
  /// them. A hint: failure is not an error.
  void populate(Access access, std::uint64_t offset, std::uint64_t bytes) const noexcept;

 private:
  boost::interprocess::mapped_region region_;
};

}  // namespace muster::os

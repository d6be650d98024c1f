// SPDX-License-Identifier: Apache-2.0
#pragma once
// What machine and surroundings this process has: for reports to people, never for decisions of the library.

#include <cstdint>
#include <optional>
#include <string>

namespace muster::os {

/// "Linux 6.1.0 x86_64".
std::string kernel_name();

struct MemoryFacts {
  std::uint64_t total_bytes = 0;  ///< of the machine
  std::uint64_t available_bytes = 0;
};
MemoryFacts memory_facts();

/// A mounted file system with room left; none where the path has none.
struct SpaceFacts {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  ///< for this user
  std::uint64_t total_files = 0;
  std::uint64_t free_files = 0;
};
std::optional<SpaceFacts> space_facts(const std::string& path) noexcept;

/// How the file system of a path is mounted, as /proc/self/mountinfo says.
struct MountFacts {
  std::string point;    ///< where it is mounted
  std::string type;     ///< "nfs4", "ext4"
  std::string source;   ///< "server:/export", "/dev/sda1"
  std::string options;  ///< of the mount and of the file system, with commas
};
/// None where it is not known.
std::optional<MountFacts> mount_facts(const std::string& path);

/// How many process namespaces this process is in: 1 outside of containers; 0 where it is not known.
int process_namespaces();

/// Whether processes can shut themselves off from system calls.
bool has_seccomp() noexcept;
/// Whether a process can be watched by a descriptor.
bool has_pidfd() noexcept;

struct ResourceLimits {
  std::optional<std::uint64_t> open_files = {};  ///< none: unlimited
  std::optional<std::uint64_t> file_bytes = {};
  std::optional<std::uint64_t> address_space = {};
};
ResourceLimits resource_limits() noexcept;

}  // namespace muster::os

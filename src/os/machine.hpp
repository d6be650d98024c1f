// SPDX-License-Identifier: Apache-2.0
#pragma once
// What machine and surroundings this process has: for reports to people, never for decisions of the library.

#include <cstdint>
#include <optional>
#include <string>

namespace muster::os {

/// "Linux 6.1.0 x86_64".
std::string kernel_name();

/// How the file system of a path is mounted, as /proc/self/mountinfo says.
struct MountFacts {
  std::string point;    ///< where it is mounted
  std::string type;     ///< "nfs4", "ext4"
  std::string source;   ///< "server:/export", "/dev/sda1"
  std::string options;  ///< of the mount and of the file system, with commas
};
/// None if it is not known.
std::optional<MountFacts> mount_facts(const std::string& path);

/// How many process namespaces this process is in: 1 outside of containers; 0 if it is not known.
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

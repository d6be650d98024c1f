// SPDX-License-Identifier: Apache-2.0
#pragma once
// Facts about the machine and the environment of this process. They are for reports to people only; the library makes
// no decisions from them.

#include <cstdint>
#include <optional>
#include <string>

namespace muster::os {

/// Returns a text such as "Linux 6.1.0 x86_64".
std::string kernel_name();

/// The mount of a path, from /proc/self/mounts.
struct MountFacts {
  std::string point;    ///< mount point
  std::string type;     ///< "nfs4", "ext4"
  std::string source;   ///< "server:/export", "/dev/sda1"
  std::string options;  ///< options of the mount and of the file system, separated by commas
};
/// Returns nullopt if the mount is unknown.
std::optional<MountFacts> mount_facts(const std::string& path);

/// Returns the number of nested process namespaces of this process: 1 outside of containers; 0 if it is unknown.
int process_namespaces();

/// Returns whether processes can restrict their own system calls.
bool has_seccomp() noexcept;
/// Returns whether the kernel supports process descriptors.
bool has_pidfd() noexcept;

struct ResourceLimits {
  std::optional<std::uint64_t> open_files = {};  ///< nullopt: unlimited
  std::optional<std::uint64_t> file_bytes = {};
  std::optional<std::uint64_t> address_space = {};
};
ResourceLimits resource_limits() noexcept;

}  // namespace muster::os

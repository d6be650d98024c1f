// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rings of running processes, and of dead processes whose shared memory a running process has open. Also the files
// that keep them when a group fails.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace muster::trace {

using Ring = std::vector<std::byte>;

/// Returns the rings that a process of this host has open: its own, and those of the ranks with which it shares memory.
/// Empty if this user may not read them.
std::vector<Ring> rings_of(const std::string& pid) noexcept;
/// Returns the rings of all accessible processes of this host, each ring once.
std::vector<Ring> all_rings();

/// The operations of this job's ranks on this host when a group fails. Never throws.
class RanksAtFailure {
 public:
  /// Reads the rings if this process is the first to detect the failure.
  explicit RanksAtFailure(bool is_first) noexcept;
  /// Writes them to a file, unless another rank of the host has done so within the last few seconds. `words`: the error
  /// message.
  void keep(std::string_view words) const noexcept;

 private:
  std::string job_;
  std::vector<Ring> rings_;
};

/// The suffix of the name of a failure file.
inline constexpr const char* failure_suffix = ".mfail";
/// Returns the directory of failure files: that of MUSTER_TRACE, else a private directory of this user below the
/// temporary directory.
std::string failure_directory();
/// Returns the failure files in a directory, newest first. Empty if the directory does not exist.
std::vector<std::string> failures_in(const std::string& directory);

}  // namespace muster::trace

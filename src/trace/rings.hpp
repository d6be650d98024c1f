// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rings of processes that run, and of dead ones whose shared memory a process that runs has open; and what is kept
// of them when a group fails.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace muster::trace {

using Ring = std::vector<std::byte>;

/// The rings that are open in a process of this host: its own, and those of the ranks that it shares memory with.
/// Nothing if that may not be seen.
std::vector<Ring> rings_of(const std::string& pid) noexcept;
/// Of all processes of this host that may be seen, each ring once.
std::vector<Ring> all_rings();

/// What the ranks of this process's job on this host are in when a group fails. Never throws.
class RanksAtFailure {
 public:
  /// Looks at them, if this process is the first that knows.
  explicit RanksAtFailure(bool is_first) noexcept;
  /// Keeps that as a file, unless another rank of the host has done so in these seconds. `words`: of the error.
  void keep(std::string_view words) const noexcept;

 private:
  std::string job_;
  std::vector<Ring> rings_;
};

/// The end of the name of such a file.
inline constexpr const char* failure_suffix = ".mfail";
/// Where they are: the directory of MUSTER_TRACE, or else one of this user's own below the temporary one.
std::string failure_directory();
/// Those in a directory, the newest first. None if there is no such directory.
std::vector<std::string> failures_in(const std::string& directory);

}  // namespace muster::trace

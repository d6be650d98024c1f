// SPDX-License-Identifier: Apache-2.0
#pragma once
// Seeing what other hosts wrote, through the caches of a network file system. In one place, for everything that reads
// a workspace:
//
//  1. A name is opened only when somebody told it or a listing showed it: a client that has once looked for a name too
//     early may go on saying that it is not there.
//  2. What is not there then, is stale (ESTALE), is too short or has old bytes, is tried again until the deadline.
//     Before each further try a probe is made in the directory and removed, and the directory listed: a change by this
//     very client makes it ask the server again.
//  3. Who waits for a name lists the directory, with growing pauses, and with a probe before it if other hosts write
//     there.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"

namespace muster::workspace {

/// Pauses between looks: short at first, at most some 10 ms where all ranks are on one file system of this host, and
/// 250 ms where a server is asked.
class Pauses {
 public:
  explicit Pauses(bool is_network) noexcept;
  /// Sleeps, at most `longest`, and longer the next time.
  void sleep(std::chrono::nanoseconds longest = std::chrono::nanoseconds::max()) noexcept;
  /// The next pause is long: what was written a moment ago should be there by now.
  [[nodiscard]] bool is_patient() const noexcept;

 private:
  std::chrono::microseconds pause_;
  std::chrono::microseconds longest_;
  std::chrono::microseconds patient_;
};

/// Makes and removes a file in the directory: its times are by the server's clock. None if it was not there. Throws
/// Error(not_found | io | no_space).
std::optional<os::FileStatus> probe(const std::string& directory);

/// Makes and removes a probe in the directory. False if this user cannot write there, or the disk is full: who only
/// reads needs no room. Then the server's own pace decides. Throws Error(not_found) if the directory is gone,
/// Error(io).
bool refresh(const std::string& directory);

/// refresh(), where other hosts write there, and the listing. Throws as these.
std::vector<os::DirectoryEntry> fresh_listing(const std::string& directory, bool is_network);

/// Longer than entries of a directory are late where servers and clients are well.
inline constexpr std::chrono::milliseconds longest_lateness = std::chrono::seconds(30);

struct Patience {
  os::Clock::time_point deadline;
  /// Asked between tries; may throw to end them.
  std::function<void()> check = {};
};

/// Rule 2: runs `attempt` until it throws nothing, or something that waiting does not mend, or the deadline has passed:
/// then its last error, with how often it was tried. Where only this host writes (`path`'s file system), what is not
/// there or wrong is tried for two seconds only; what is wrong, for 90 s at most: longer than caches live.
void patiently(const std::string& path, const Patience& patience, const std::function<void()>& attempt);

// The directory that is a workspace, and its mark.
//
//  1. The directory is listed, never asked for a name that another rank may be about to make.
//  2. A mark in it decides: its version is known, or the directory is refused.
//  3. Without a mark, a directory that is empty or has only names of ours (a rank of the same job is a moment ahead)
//     gets one; of several ranks that make it, one succeeds, and the others find it. A mark that is empty was lost in a
//     power cut, and is made anew.
//  4. The directory and its mark are on the disk before anything is written there.

inline constexpr int workspace_version = 1;

struct WorkspaceDirectory {
  std::string path;         ///< without a slash at its end
  bool is_network = false;  ///< other hosts may write to it
};

/// Makes the directory (and those above it) and the mark where they are not there. Local, any number of processes at a
/// time. Throws Error(argument) where the path is a file, a dangling link, or a directory that is no workspace;
/// Error(version) where a newer Muster marked it; Error(corrupt) on a damaged mark; Error(io | no_space).
WorkspaceDirectory prepare_workspace(const std::string& path);

/// Whether the mark says anything: false for an empty one, and for zeros. Throws Error(version | corrupt), and as
/// read_small_file.
bool check_mark(const std::string& workspace);

}  // namespace muster::workspace

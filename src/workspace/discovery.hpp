// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads files that other hosts wrote, despite the caches of a network file system. Everything that reads a workspace
// uses these rules:
//
//  1. A name is opened only after a message or a directory listing announced it. A client that looked up a name too
//     early may cache that the name is missing.
//  2. If a file is then missing, stale (ESTALE), too short or has old bytes, the read is repeated until the deadline.
//     Before each retry a probe file is made in the directory and removed, and the directory is listed: a change by
//     this client makes it query the server again.
//  3. A rank that waits for a name lists the directory, with growing pauses. If other hosts write to the directory, a
//     probe precedes each listing.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"

namespace muster::workspace {

/// Pauses between directory listings. They are short at first. They grow to about 10 ms if all ranks use a file system
/// of this host, and to 250 ms on a network file system.
class Pauses {
 public:
  explicit Pauses(bool is_network) noexcept;
  /// Sleeps, at most `longest`, and longer on the next call.
  void sleep(std::chrono::nanoseconds longest = std::chrono::nanoseconds::max()) noexcept;
  /// Whether the next pause is long, so that a file written a moment ago should be visible after it.
  [[nodiscard]] bool is_patient() const noexcept;

 private:
  std::chrono::microseconds pause_;
  std::chrono::microseconds longest_;
  std::chrono::microseconds patient_;
};

/// Makes and removes a file in the directory, and returns its status: its times are those of the server's clock.
/// Returns nullopt if the probe was already missing. Throws Error(not_found | io | out_of_space).
std::optional<os::FileStatus> probe(const std::string& directory);

/// Makes and removes a probe in the directory. Returns false if this user cannot write there or the disk is full,
/// because a reader needs no free space. The lifetimes of caches then decide when changes become visible. Throws
/// Error(not_found) if the directory is missing, and Error(io).
bool refresh(const std::string& directory);

/// Lists the directory, after refresh() if other hosts write to it. Throws as refresh().
std::vector<os::DirectoryEntry> fresh_listing(const std::string& directory, bool is_network);

/// Directory entries become visible within this time if servers and clients are healthy.
inline constexpr std::chrono::milliseconds longest_lateness = std::chrono::seconds(30);

struct Patience {
  os::Clock::time_point deadline;
  /// Called between tries; may throw to end them.
  std::function<void()> check = {};
};

/// Applies rule 2: runs `attempt` until it succeeds, fails with an error that waiting does not cure, or the deadline
/// has passed. The last error is then thrown, with the number of tries. If only this host writes to the file system of
/// `path`, missing or wrong files are retried for only two seconds. Wrong contents are retried for at most 90 s, which
/// exceeds the lifetime of caches.
void patiently(const std::string& path, const Patience& patience, const std::function<void()>& attempt);

// The directory that is a workspace, and its marker file.
//
//  1. The directory is listed. A name that another rank may be about to make is never looked up.
//  2. The marker file decides: its version must be known, otherwise the directory is rejected.
//  3. A directory without a marker gets one if it is empty or has only Muster's names, because another rank of the job
//     may have just started. If several ranks make it, one succeeds and the others find its file. An empty marker was
//     lost in a power cut, and is written again.
//  4. The directory and its marker are durable before anything else is written there.

inline constexpr int workspace_version = 1;

struct WorkspaceDirectory {
  std::string path;         ///< without a trailing slash
  bool is_network = false;  ///< other hosts may write to it
};

/// Makes the directory, its parents and the marker if they are missing. Local; any number of processes may call it at a
/// time. Throws Error(invalid_argument) if the path is a file, a dangling link, or a directory that is not a workspace;
/// Error(version) if a newer Muster made the marker; Error(corrupt) if the marker is damaged; Error(io | out_of_space).
WorkspaceDirectory prepare_workspace(const std::string& path);

/// Throws Error(invalid_argument): the directory has no marker, but files of another program, such as `file`.
[[noreturn]] void refuse_other_files(const std::string& workspace, const std::string& file);

/// Returns whether the marker has contents: false if it is empty or all zeros. Throws Error(version | corrupt), and as
/// read_small_file.
bool check_mark(const std::string& workspace);

}  // namespace muster::workspace

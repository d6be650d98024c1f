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
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/os/directory.hpp"

namespace muster::workspace {

/// Pauses between looks: short at first, at most some 10 ms where all ranks are on one file system of this host, and
/// 250 ms where a server is asked.
class Pauses {
 public:
  explicit Pauses(bool is_network) noexcept;
  /// Sleeps, and longer the next time.
  void sleep() noexcept;
  /// The next pause is long: what was written a moment ago should be there by now.
  [[nodiscard]] bool is_patient() const noexcept;

 private:
  std::chrono::microseconds pause_;
  std::chrono::microseconds longest_;
  std::chrono::microseconds patient_;
};

/// Makes and removes a probe in the directory. False if this user cannot write there, or the disk is full: who only
/// reads needs no room. Then the server's own pace decides. Throws Error(not_found) if the directory is gone,
/// Error(io).
bool refresh(const std::string& directory);

/// refresh(), where other hosts write there, and the listing. Throws as these.
std::vector<os::DirectoryEntry> fresh_listing(const std::string& directory, bool is_network);

/// Longer than entries of a directory are late where servers and clients are well.
inline constexpr std::chrono::milliseconds longest_lateness = std::chrono::seconds(30);

struct Patience {
  std::chrono::steady_clock::time_point deadline;
  /// Asked between tries; may throw to end them.
  std::function<void()> check = {};
};

/// Whether an error may be no more than an old cache: no such file, ESTALE, or bytes that contradict their format.
bool may_be_a_cache(const Error& error) noexcept;

/// Rule 2: runs `attempt` until it throws nothing, or something that waiting does not mend, or the deadline has passed:
/// then its last error, with how often it was tried. Where only this host writes (`path`'s file system), what is not
/// there or wrong is tried for two seconds only; what is wrong, for 90 s at most: longer than caches live.
void patiently(const std::string& path, const Patience& patience, const std::function<void()>& attempt);

}  // namespace muster::workspace

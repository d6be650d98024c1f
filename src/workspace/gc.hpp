// SPDX-License-Identifier: Apache-2.0
#pragma once
// Clean-up of a workspace deletes files that no process can need. The first rule that applies decides:
//
//  1. Files that Muster did not write, and the marker file, are kept.
//  2. Files that a process makes and removes itself (exchange files, tokens, probes, growing files) are deleted if that
//     process is proved dead: same host, boot and process namespace, and no such process. They are kept if the process
//     lives.
//  3. The directory of a file group is deleted if each of its ranks has left or is proved dead. It is kept if one rank
//     lives, or if it has a file that Muster did not write.
//  4. A meeting directory is deleted if it is empty or every process in it is proved dead. It is kept if it has a file
//     that Muster did not write.
//  5. Anything else (states, kept files, leftovers of processes on other hosts) is deleted only if `older_than` is
//     given and the newest change is older than that by the server's clock. The newest complete state of each rank
//     counts for all earlier ones: the states of a job are deleted together or not at all.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/workspace/survey.hpp"

namespace muster::workspace {

struct GcOptions {
  /// If true, nothing is removed, and the report lists the files that would be.
  bool dry_run = true;
  /// The age for rule 5. Without it, only leftovers of processes that are proved dead are removed.
  std::optional<std::chrono::seconds> older_than = {};
};

enum class GcVerdict : std::uint8_t {
  remove,  ///< removed, or would be
  keep,
  failed,  ///< could not be deleted; `reason` has the system's error message
};

struct GcItem {
  std::string file;  ///< its name in the workspace
  NameKind kind = NameKind::growing;
  std::uint64_t bytes = 0;
  std::uint64_t files = 1;
  std::chrono::seconds age{0};  ///< by the server's clock
  GcVerdict verdict = GcVerdict::keep;
  /// one line, such as "its writer (pid 12 on host "a") has ended"
  std::string reason;
};

struct GcReport {
  std::vector<GcItem> items;  ///< all of Muster's files except the marker, sorted by name
  std::uint64_t removed_bytes = 0;
  std::uint64_t removed_files = 0;
};

/// Returns "12 s", "5 min", "3 h" or "2 d"; "now" for less than a second and for times in the future.
std::string age_text(std::chrono::seconds age);

/// Applies all rules and returns a report. Throws as survey(). A file that cannot be removed is an item, not an error.
/// A dry run makes a probe file to read the server's clock only if `older_than` is given. In a read-only directory,
/// this host's clock is used.
GcReport collect_garbage(const std::string& path, const GcOptions& options = {});

/// Applies rules 2 to 4 only, without a report: a starting program removes the leftovers of earlier ones. Returns the
/// number of deleted entries.
std::uint64_t sweep_dead(const std::string& path) noexcept;

}  // namespace muster::workspace

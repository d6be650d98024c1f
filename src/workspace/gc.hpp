// SPDX-License-Identifier: Apache-2.0
#pragma once
// Clean-up of a workspace: what nobody can need any more goes. Rules, the first that fits decides:
//
//  1. What is not ours, and the mark, stays.
//  2. What a process makes and removes itself (exchange files, tokens, probes, growing files) goes if that process is
//     proved dead: same host, boot and process namespace, and no such process. It stays if the process lives.
//  3. The directory of a file group goes if each of its ranks has left or is proved dead; it stays if one lives, or if
//     there is a file in it that is not Muster's.
//  4. A meeting goes if everyone in it is proved dead, or if it is empty; it stays if it has a file of others in it.
//  5. Anything else (states, kept files, what other hosts' processes left) goes only where `older_than` is given and
//     the newest change is longer ago by the server's clock. Of states, the newest complete one of each rank of a job
//     counts for all earlier ones: a job's states go together or not at all.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/workspace/survey.hpp"

namespace muster::workspace {

struct GcOptions {
  /// True: nothing is removed, the answer is what would be.
  bool dry_run = true;
  /// Rule 5; none: only what is proved to be nobody's.
  std::optional<std::chrono::seconds> older_than = {};
};

enum class GcVerdict : std::uint8_t {
  remove,  ///< removed, or would be
  keep,
  failed,  ///< should have gone; `reason` has what the system said
};

struct GcItem {
  std::string file;  ///< its name in the workspace
  NameKind kind = NameKind::growing;
  std::uint64_t bytes = 0;
  std::uint64_t files = 1;
  std::chrono::seconds age{0};  ///< by the server's clock
  GcVerdict verdict = GcVerdict::keep;
  std::string reason;  ///< "its writer (host a, pid 12) is gone", "a complete state: only with an age": one line
};

struct GcReport {
  std::vector<GcItem> items;  ///< all of ours but the mark, in the order of their names
  std::uint64_t removed_bytes = 0;
  std::uint64_t removed_files = 0;
};

/// "12 s", "5 min", "3 h", "2 d"; "now" below a second and for what is in the future.
std::string age_text(std::chrono::seconds age);

/// Throws as survey(); that a file cannot be removed is an item, not an error. A dry run makes a probe file for the
/// server's clock only where `older_than` is given; where the directory is read-only, this host's clock counts.
GcReport collect_garbage(const std::string& path, const GcOptions& options = {});

/// Rules 2 to 4 alone, quietly: what a program that begins does with what earlier ones left. Returns how many went.
std::uint64_t sweep_dead(const std::string& path) noexcept;

}  // namespace muster::workspace

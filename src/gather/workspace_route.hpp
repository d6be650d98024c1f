// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workspace route: declarations that its parts share, and the state that a rank keeps with a group for it. The root
// is the first rank of a list.
//
//  1. Preflight: when ranks of a list first use a directory together, the root creates a token file in it before round
//     1. It announces the token in its record. The senders look for the token before any byte moves. If two hosts use
//     the same path for different directories, all ranks refuse the call in a separate round.
//  2. Move, sender: splits its tree into config and weights, and writes them as a state file under a name that was
//     never used. The file gets its name when it is complete. It is not fsynced unless it is kept, because it is
//     deleted as soon as it was read. The sender sends the name to the root through the group. If writing fails, it
//     sends a message without a name, so that the root does not wait for it.
//  3. Move, root: receives every message, even if one of them is invalid. It opens the announced names (discovery.hpp),
//     maps files on this host's disks, and reads files on a network file system.
//  4. Commit, after the closing round, which is the acknowledgement. The sender deletes its file, or leaves it if files
//     are kept. In a stream the root deletes each part as soon as it has read it: that is the sender's credit.
// Files of a killed rank have its process in their names; the next clean-up deletes them (gc.hpp).

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/state.hpp"
#include "src/gather/route.hpp"
#include "src/os/process.hpp"
#include "src/workspace/discovery.hpp"

namespace muster::gather {

/// Deletes its file in the destructor, but only in the process that created it, not in a forked child.
class PassingFile {
 public:
  PassingFile() = default;
  explicit PassingFile(std::string path) : path_(std::move(path)) {}
  PassingFile(PassingFile&& other) noexcept : path_(std::exchange(other.path_, {})), owner_pid_(other.owner_pid_) {}
  PassingFile& operator=(PassingFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(owner_pid_, other.owner_pid_);
    return *this;
  }
  ~PassingFile();
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  void keep() noexcept { path_.clear(); }

 private:
  std::string path_;
  std::int64_t owner_pid_ = os::process_id();
};

struct WorkspaceRouteState {
  std::map<std::string, workspace::WorkspaceDirectory> directories;  // by the path as it was given
  std::set<std::pair<std::string, int>> confirmed;  // path, and a rank that sees the same directory there
  std::uint64_t parts = 0;                          // of streams: numbers their files
  std::deque<PassingFile> under_way;                // of streams: files that the root may not have read yet
};

/// Returns the workspace that a call uses. The first use prepares it and deletes files that dead processes of this host
/// left there. Throws as prepare_workspace.
const workspace::WorkspaceDirectory& workspace_of(const GatherCall& call, WorkspaceRouteState& state);

// Steps 2 to 4: the file operations that all kinds of transfers share.

/// A member's own value as a file.
class SentFile {
 public:
  SentFile(const GatherCall& call, WorkspaceRouteState& state) : call_(call), state_(state) {}
  /// Before round 1: determines what must be written. Throws Error(invalid_argument) on an invalid tree.
  void offer(ExchangeRecord& record);
  /// Writes the file and, unless this rank is the root, sends its name to the root. Throws Error(out_of_space | io |
  /// unsupported).
  void send();
  /// Called when the file has been read: deletes it unless files are kept.
  void commit() noexcept;
  /// For a part of a stream, after commit(): returns the obligation that ends when the root deletes the file.
  [[nodiscard]] std::unique_ptr<OutstandingLease> obligation();

 private:
  void write(const std::string& path);

  const GatherCall& call_;
  WorkspaceRouteState& state_;
  State value_;
  PassingFile file_;
};

/// On the root: returns the values of all members that have one, by position; the root's own entry stays empty.
/// Receives all messages, and then throws the first failure.
std::vector<std::optional<Config>> receive_files(const GatherCall& call, WorkspaceRouteState& state,
                                                 const Records& records);

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workspace route: what its parts have in common, and what a rank keeps with a group for it.
//
//  1. preflight: the first time that ranks of a list use a directory together, the first rank puts a token into it
//     before round 1 and says so in its record. The senders look for it before a byte moves: a directory that is only
//     called the same on two hosts is refused on all ranks, in a round of its own.
//  2. move, sender: its tree, split into config and weights, becomes a state file under a name that was never used.
//     It is whole when it has its name; it is not fsynced unless it is to stay, because it goes as soon as it was read.
//     The name goes to the first rank through the group. If writing fails, a message without a name says so: the
//     first rank must not wait for it.
//  3. move, first rank: takes every message, even when one of them is bad; opens the names that it was told
//     (discovery.hpp); maps the files of this host's disks, reads those of a network.
//  4. commit, after the closing round, which is the acknowledgement: the sender removes its file, or leaves it where
//     files are kept. Of a stream's parts the first rank removes each as soon as it has it: that is the sender's
//     credit.
// What a killed rank leaves has its process in its name, and goes with the next clean-up (gc.hpp).

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

/// Removes its file when it goes, in the process that has made it: not in a forked child.
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
  std::set<std::pair<std::string, int>> confirmed;                   // path, and a rank that sees the same there
  std::uint64_t parts = 0;                                           // of streams: numbers their files
  std::deque<PassingFile> under_way;                                 // of streams: what the first rank may not have yet
};

/// The workspace that a call goes by. Prepared at first use, and cleared of what dead processes of this host left
/// there. Throws as prepare_workspace.
const workspace::WorkspaceDirectory& workspace_of(const Call& call, WorkspaceRouteState& state);

// Steps 2 to 4: what transfers of any kind do with files.

/// A member's own value as a file.
class SentFile {
 public:
  SentFile(const Call& call, WorkspaceRouteState& state) : call_(call), state_(state) {}
  /// Before round 1: what there is to write. Throws Error(argument) on a tree that cannot be.
  void offer(Record& record);
  /// Writes it and tells the first rank, if this rank is not the first. Throws Error(no_space | io | unsupported).
  void send();
  /// It has been read: it goes, unless it is to stay.
  void commit() noexcept;
  /// Of a part of a stream, after commit(): the first rank removes it.
  [[nodiscard]] std::unique_ptr<Obligation> obligation();

 private:
  void write(const std::string& path);

  const Call& call_;
  WorkspaceRouteState& state_;
  State value_;
  PassingFile file_;
};

/// On the first rank: the values of all members that have one, by position; its own place stays empty. Throws what
/// failed first, after all messages were taken.
std::vector<std::optional<Config>> receive_files(const Call& call, WorkspaceRouteState& state,
                                                 std::span<const Record> records);

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The meeting: how processes that know nothing but a directory, a key and their rank become a job.
//
//  1. Each rank makes a random token and says hello in meeting-KEY/: rank, size and token are in the file's name.
//  2. Rank 0 lists, and calls: one file with all tokens that it sees, another one whenever it sees more. Hellos of
//     processes that are proved dead are left out, and removed.
//  3. A rank that finds its own token in a call answers "here". What an earlier job left behind does not answer, and
//  its
//     calls do not have this rank's token: neither can be taken for a live rank.
//  4. Once each rank has answered, rank 0 makes the job's nonce and directory and writes who the ranks are. It writes
//  why
//     not instead, for everybody, where two answer for one rank, sizes or versions differ, or a rank was called by two.
//  5. Each rank reads that, says in the job's directory which process it is, removes its hello and its answer, and all
//     meet in a first barrier; then rank 0 removes its calls and the list.
// A rank that dies before it has answered is missed at the deadline; one that dies later is missed in the first
// barrier.

#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "muster/workspace.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {

/// A rank's files in a meeting, removed with it.
class Meeting {
 public:
  /// `workspace` is prepared. Step 1.
  Meeting(const WorkspaceDirectory& workspace, const FileGroupOptions& options, std::chrono::milliseconds timeout);
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting();

  struct Job {
    SyncGroup::Nonce nonce{};
    std::string directory;
    std::vector<GroupMember> members;
  };
  /// Steps 2 to 4, and "member" of step 5. Throws Error(timeout | rank_mismatch | version | peer_lost), Error(io |
  /// no_space).
  Job attend();

 private:
  struct Seen;
  Job lead();
  Job follow();
  std::map<std::string, MeetingName> call_all(const Seen& seen);
  [[nodiscard]] bool has_answered(const Seen& seen, const std::map<std::string, MeetingName>& hellos) const;
  [[noreturn]] void refuse(const Error& cause);
  void write(const std::string& name, const std::string& text);
  [[nodiscard]] Seen look() const;
  [[nodiscard]] std::string text_of(const std::string& file) const;
  [[nodiscard]] bool is_late(std::chrono::milliseconds grace = {}) const;
  Job take(const std::string& file);

  WorkspaceDirectory workspace_;
  FileGroupOptions options_;
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point deadline_;
  std::string path_;
  std::string token_;
  std::vector<std::string> own_files_;
  // Rank 0's.
  std::set<std::string> called_;
  std::uint64_t calls_ = 0;
};

}  // namespace muster::workspace

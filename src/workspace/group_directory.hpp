// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory of a file group, as one process of the job sees it. All groups of the job (the first one, duplicates,
// auxiliary groups) share one directory, so a waiting rank needs only one listing.
//
//  1. Each process renames its heartbeat file at the agreed interval, and then lists the directory. Thus others see
//     that it lives, and it sees them. A rank of this host is known to be dead when its process has ended, a rank of
//     another host when its heartbeat stops.
//  2. The liveness state of a group (the current step of each rank, and its progress) is stored in file names, too. The
//     states of other ranks come from the last listing. If the own state has changed, the next heartbeat writes it as a
//     name.
//  3. A process that releases the directory leaves a "gone" file. A process that finds that all have left or are dead
//     removes the directory.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/workspace.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/group/progress.hpp"
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {

struct GroupMember {
  RankInfo info;
  os::ProcessIdentity identity;
};

/// The facts that the ranks of a file group share after the rendezvous.
struct FileGroupFacts {
  Group::Nonce nonce{};
  std::string directory;
  std::vector<GroupMember> members;
  std::shared_ptr<void> meeting;  ///< this rank's rendezvous files, deleted when all ranks have read them
};
/// Forms a job of processes that know only a directory, a key and their rank (rendezvous/files.cpp). `workspace` is
/// prepared. Throws Error(timeout | rank_mismatch | version | peer_lost), Error(io | out_of_space).
FileGroupFacts meet(const WorkspaceDirectory& workspace, const FileGroupOptions& options,
                    std::chrono::milliseconds timeout);

/// Returns the workspace that the ranks of a file group share; empty for any other group.
std::string workspace_of(const Group& group);

/// One listing of the directory.
class Snapshot {
 public:
  Snapshot() = default;
  explicit Snapshot(std::vector<std::string> names);
  [[nodiscard]] bool has(std::string_view name) const;
  /// Returns the first name with this prefix; empty if none matches.
  [[nodiscard]] std::string first(std::string_view prefix) const;
  /// Returns all names with this prefix, sorted.
  [[nodiscard]] std::span<const std::string> with_prefix(std::string_view prefix) const;

 private:
  std::vector<std::string> names_;
};

/// Detects dead ranks: by their process on this host, and by missing heartbeats on other hosts.
class FilePeers final : public group::Peers {
 public:
  FilePeers(int self, std::span<const GroupMember> members, std::chrono::milliseconds heartbeat,
            std::chrono::milliseconds lost_after);
  [[nodiscard]] std::optional<std::string> end_of(int rank) const override;
  [[nodiscard]] std::string state_of(int rank) const override;
  /// Records whose heartbeat changed, and adds to the silence of the others. Only time in which this process listed the
  /// directory counts, because a stopped process sees no heartbeats.
  void hear(const Snapshot& snapshot);
  /// Whether the process table of this host proves that the rank is dead.
  [[nodiscard]] bool is_dead_here(int rank) const;

 private:
  struct Heard {
    std::string beat;
    std::chrono::milliseconds silent{0};
  };
  int self_;
  std::vector<os::ProcessIdentity> identities_;
  std::vector<bool> is_here_;
  std::chrono::milliseconds heartbeat_;
  std::chrono::milliseconds lost_after_;
  mutable ForkMutex mutex_;
  std::vector<Heard> heard_;
  std::chrono::steady_clock::time_point listened_ = std::chrono::steady_clock::now();
};

/// Thread-safe.
class GroupDirectory {
 public:
  struct Options {
    std::string workspace;
    std::string path;
    int rank = 0;
    std::chrono::milliseconds heartbeat{1000};
    std::chrono::milliseconds lost_after{30000};
    bool is_network = false;
  };
  GroupDirectory(Options options, std::vector<GroupMember> members);

  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] const FilePeers& peers() const noexcept { return peers_; }
  [[nodiscard]] const std::vector<GroupMember>& members() const noexcept { return members_; }

  /// Lists the directory. If that fails, returns the last listing; throws once it has failed for five seconds.
  std::shared_ptr<const Snapshot> look(bool with_probe = false, bool is_heartbeat = false);
  /// Returns the last listing, or a new one if that is too old.
  std::shared_ptr<const Snapshot> recent(std::chrono::milliseconds longest_ago);
  /// Receives each new listing, on the thread that listed, until it is destroyed.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void notice(const Snapshot& snapshot, bool is_heartbeat) = 0;
  };
  void watch(std::weak_ptr<Watcher> watcher);
  /// Renames the heartbeat file and lists the directory. Called by one thread at a time.
  void beat();

  void publish(const std::string& name, std::span<const std::byte> bytes);
  bool publish_first(const std::string& name, std::span<const std::byte> bytes);
  /// Reads a file of exactly `bytes` bytes; retries until the deadline (discovery.hpp).
  [[nodiscard]] std::vector<std::byte> read(const std::string& name, std::uint64_t bytes,
                                            std::chrono::milliseconds timeout) const;
  /// Renames `from`, or makes an empty file `to` if `from` is missing.
  void renew(const std::string& from, const std::string& to) const;
  void remove(const std::string& name) const noexcept;
  /// Counts the groups whose rank 0 is this process.
  int next_count() noexcept { return groups_.fetch_add(1) + 1; }

 private:
  /// Runs `work`. If this process has no descriptor left, frees the reserved one and runs `work` again. So a rank that
  /// cannot open anything else can still report its failure.
  template <class Work>
  auto with_reserve(const Work& work) const;
  [[nodiscard]] std::string path_of(const std::string& name) const { return options_.path + "/" + name; }

  Options options_;
  std::vector<GroupMember> members_;
  FilePeers peers_;
  mutable ForkMutex reserve_mutex_;
  mutable os::Fd reserve_;
  std::uint64_t beats_ = 0;  // used by the heartbeat thread only
  std::atomic<int> groups_{0};
  ForkMutex mutex_;  // guards the members below
  std::shared_ptr<const Snapshot> snapshot_ = std::make_shared<const Snapshot>();
  std::chrono::steady_clock::time_point looked_;
  std::optional<os::Clock::time_point> trouble_since_;
  std::vector<std::weak_ptr<Watcher>> watchers_;
};

/// The heartbeat of one process in a directory, shared by its groups. It starts with the object. The destructor ends it
/// and the process's membership of the directory. In a forked child the destructor leaves the directory unchanged.
class Heart {
 public:
  explicit Heart(std::shared_ptr<GroupDirectory> directory);
  Heart& operator=(Heart&&) = delete;
  ~Heart();
  [[nodiscard]] const std::shared_ptr<GroupDirectory>& directory() const noexcept { return directory_; }

 private:
  struct HeartState;
  static void run(GroupDirectory& directory, HeartState& shared);
  std::shared_ptr<GroupDirectory> directory_;
  std::shared_ptr<HeartState> shared_;
  os::Thread thread_;
};

/// Removes a file group's directory with the group's files. Files that cannot be removed, or are not the group's, are
/// kept.
void remove_group_directory(const std::string& path) noexcept;

/// Thread-safe.
class GroupPulse final : public group::Pulse, public GroupDirectory::Watcher {
 public:
  /// `self`: this rank's number in the group.
  static std::shared_ptr<GroupPulse> create(std::shared_ptr<GroupDirectory> directory, int group, int self);

  [[nodiscard]] bool has_left(int rank) const override;
  [[nodiscard]] std::uint64_t progress_of(int rank) const override;
  [[nodiscard]] std::uint32_t awaited_by(int rank) const override;
  void tell_awaited(int self, std::uint32_t awaited) noexcept override;
  [[nodiscard]] std::string phase(int rank) const override;
  /// Aborts the group. A failure that cannot be written to the directory applies only to this rank, until a later
  /// heartbeat can write it.
  void abort(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> error() const override;
  [[nodiscard]] bool has_failure() const noexcept override { return has_failure_.load(std::memory_order_acquire); }

  void progress() noexcept { progress_.fetch_add(1, std::memory_order_relaxed); }
  /// `phase` must be a string literal or other static text.
  void set_phase(const char* phase) noexcept { phase_.store(phase, std::memory_order_relaxed); }

  void notice(const Snapshot& snapshot, bool is_heartbeat) override;

 private:
  GroupPulse(std::shared_ptr<GroupDirectory> directory, int group, int self);
  void publish_own();
  void publish_failure(const Error& cause);
  void set_failure(const Error& cause) noexcept;
  void load_failure();
  [[nodiscard]] PulseName pulse_of(int rank) const;

  std::shared_ptr<GroupDirectory> directory_;
  int group_;
  int self_;
  std::atomic<std::uint64_t> progress_{0};
  std::atomic<std::uint32_t> awaited_{0};
  std::atomic<const char*> phase_{group::between_calls};

  ForkMutex own_mutex_;  // guards the members below: the name in the directory
  std::optional<PulseName> published_;

  mutable ForkMutex failure_mutex_;
  std::optional<Error> failure_;
  bool is_untold_ = false;  // the failure is not yet in the directory
  std::atomic<bool> has_failure_{false};
};

}  // namespace muster::workspace

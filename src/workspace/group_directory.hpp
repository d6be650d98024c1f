// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory of a file group, as one process of the job sees it. All groups of the job (the first, duplicates,
// companions) are in one directory, so that one listing shows a waiting rank everything.
//
//  1. Each process renames its beat as often as was agreed, and lists the directory then: that is how it is seen to
//     live, and how it sees others. A rank of this host is seen to be dead by its process, one of another by its
//     silence.
//  2. The pulse of a group (where its ranks are, whether they get on) is in names, too: others' is read out of the last
//     listing; the own one becomes a name at each heartbeat, where it has changed.
//  3. A process that lets go of the directory leaves "gone". Whoever finds that all have gone or are dead removes it.

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
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"
#include "src/sync/pulse.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {

struct GroupMember {
  RankInfo info;
  os::ProcessIdentity identity;
};

/// What the ranks of a file group know once they have met.
struct Job {
  SyncGroup::Nonce nonce{};
  std::string directory;
  std::vector<GroupMember> members;
  std::shared_ptr<void> meeting;  ///< this rank's files in it, which go when all have read them
};
/// How processes that know nothing but a directory, a key and their rank become a job (meeting.cpp). `workspace` is
/// prepared. Throws Error(timeout | rank_mismatch | version | peer_lost), Error(io | no_space).
Job meet(const WorkspaceDirectory& workspace, const FileGroupOptions& options, std::chrono::milliseconds timeout);

/// The workspace that the ranks of a file group have in common; empty of any other group.
std::string workspace_of(const SyncGroup& group);

/// One listing of the directory.
class Snapshot {
 public:
  Snapshot() = default;
  explicit Snapshot(std::vector<std::string> names);
  [[nodiscard]] bool has(std::string_view name) const;
  /// The first name that begins like that; empty if there is none.
  [[nodiscard]] std::string first(std::string_view prefix) const;
  /// All of them, sorted.
  [[nodiscard]] std::span<const std::string> with_prefix(std::string_view prefix) const;

 private:
  std::vector<std::string> names_;
};

/// Ranks whose death is seen by their process where they are on this host, else by their silence.
class FilePeers final : public sync::Peers {
 public:
  FilePeers(int self, std::span<const GroupMember> members, std::chrono::milliseconds heartbeat,
            std::chrono::milliseconds lost_after);
  [[nodiscard]] std::optional<std::string> end_of(int rank) const override;
  [[nodiscard]] std::string state_of(int rank) const override;
  /// Who has beaten, and who has been silent for how much longer. Only time in which this process looked counts: one
  /// that was stopped itself has not heard anybody.
  void hear(const Snapshot& snapshot);
  /// Proved by the process itself.
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

  /// Lists now. Where that fails, the last listing; throws once it has failed for five seconds.
  std::shared_ptr<const Snapshot> look(bool with_probe = false, bool is_heartbeat = false);
  /// The last listing, or a new one where that is older.
  std::shared_ptr<const Snapshot> recent(std::chrono::milliseconds longest_ago);
  /// What is told of each new listing, on the thread that listed; until it dies.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void notice(const Snapshot& snapshot, bool is_heartbeat) = 0;
  };
  void watch(std::weak_ptr<Watcher> watcher);
  /// The beat, and a look. Called by one thread at a time.
  void beat();

  void publish(const std::string& name, std::span<const std::byte> bytes);
  bool publish_first(const std::string& name, std::span<const std::byte> bytes);
  /// Of exactly `bytes` bytes; tried again until the deadline (discovery.hpp).
  [[nodiscard]] std::vector<std::byte> read(const std::string& name, std::uint64_t bytes,
                                            std::chrono::milliseconds timeout) const;
  /// Renames `from`, or makes `to` (empty) where that is not there.
  void renew(const std::string& from, const std::string& to) const;
  void remove(const std::string& name) const noexcept;
  /// Of the groups that this process is the first rank of.
  int next_count() noexcept { return groups_.fetch_add(1) + 1; }

 private:
  /// Runs `work`; if this process has no descriptor left, once more with the one that is kept for that: a rank that
  /// cannot open anything else can still say so.
  template <class Work>
  auto with_reserve(const Work& work) const;
  [[nodiscard]] std::string path_of(const std::string& name) const { return options_.path + "/" + name; }

  Options options_;
  std::vector<GroupMember> members_;
  FilePeers peers_;
  mutable ForkMutex reserve_mutex_;
  mutable os::Fd reserve_;
  std::uint64_t beats_ = 0;  // of the thread that beats
  std::atomic<int> groups_{0};
  ForkMutex mutex_;  // of what follows
  std::shared_ptr<const Snapshot> snapshot_ = std::make_shared<const Snapshot>();
  std::chrono::steady_clock::time_point looked_;
  std::optional<os::Clock::time_point> trouble_since_;
  std::vector<std::weak_ptr<Watcher>> watchers_;
};

/// The heartbeat of one process in a directory; shared by its groups. Begins when it is made, and ends, with the
/// process's part in the directory, when it goes. In a forked child it goes without a word.
class Heart {
 public:
  explicit Heart(std::shared_ptr<GroupDirectory> directory);
  Heart& operator=(Heart&&) = delete;
  ~Heart();
  [[nodiscard]] const std::shared_ptr<GroupDirectory>& directory() const noexcept { return directory_; }

 private:
  struct Shared;
  static void run(GroupDirectory& directory, Shared& shared);
  std::shared_ptr<GroupDirectory> directory_;
  std::shared_ptr<Shared> shared_;
  os::Thread thread_;
};

/// Removes a file group's directory with all of its files. What cannot be removed stays, and what is not the group's.
void remove_group_directory(const std::string& path) noexcept;

/// Thread-safe.
class GroupPulse final : public sync::Pulse, public GroupDirectory::Watcher {
 public:
  /// `self`: this rank's number in the group.
  static std::shared_ptr<GroupPulse> create(std::shared_ptr<GroupDirectory> directory, int group, int self);

  [[nodiscard]] bool has_left(int rank) const override;
  [[nodiscard]] std::uint64_t progress_of(int rank) const override;
  [[nodiscard]] std::uint32_t awaited_by(int rank) const override;
  void tell_awaited(int self, std::uint32_t awaited) noexcept override;
  [[nodiscard]] std::string phase(int rank) const override;
  /// A failure that cannot be told the others counts here alone, until a later heartbeat can tell it.
  void poison(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> failure() const override;
  [[nodiscard]] bool has_failure() const noexcept override { return has_failure_.load(std::memory_order_acquire); }

  void progress() noexcept { progress_.fetch_add(1, std::memory_order_relaxed); }
  /// Static text.
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
  std::atomic<const char*> phase_{sync::between_calls};

  ForkMutex own_mutex_;  // of what follows: the name that is there
  std::optional<PulseName> published_;

  mutable ForkMutex failure_mutex_;
  std::optional<Error> failure_;
  bool is_untold_ = false;  // the failure is not in the directory
  std::atomic<bool> has_failure_{false};
};

}  // namespace muster::workspace

// SPDX-License-Identifier: Apache-2.0
#pragma once
// SyncGroup: the ranks of an exchange and the small things they do together: barrier, all-gather of a record, message
// to one rank. Every wait has a deadline; who is missing is named; one rank's failure reaches all. Semantics: the
// "barrier sync group" of the reference's gathers, and MPI's communicator for rank, size, duplicate.

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"

namespace muster {

/// Where a rank lives.
struct RankInfo {
  int rank = 0;          ///< as messages call it: its number in the job that it belongs to
  std::string host;      ///< host name, for messages only
  std::int64_t pid = 0;  ///< as the rank itself sees it
};

struct WaitOptions {
  /// The longest wait without progress of the ranks waited for; none: the group's own.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::stop_token stop = {};
  /// What this wait is part of, for messages ("barrier", "gather: round 1"). Static text: it is not copied.
  const char* phase = "barrier";
};

namespace sync {
class Group;
}

class SyncGroup;

struct AllRanks {};
/// The ranks of the group of the call in their order: 0, 1, ...
inline constexpr AllRanks all_ranks;

/// A list of ranks, as calls take it: all_ranks, `{0, 2}`, a vector, an array or a span. Looks at the caller's
/// numbers, as a span does: made for the call, not to be kept.
class RankList {
 public:
  RankList(AllRanks) noexcept : is_all_(true) {}
  RankList(std::initializer_list<int> ranks) noexcept : ranks_(std::data(ranks), ranks.size()) {}
  template <std::convertible_to<std::span<const int>> List>
  RankList(const List& ranks) noexcept : ranks_(ranks) {}

  /// The ranks in this group, which outlives them where they are all.
  [[nodiscard]] std::span<const int> in(const SyncGroup& group) const noexcept;

 private:
  std::span<const int> ranks_;
  bool is_all_ = false;
};

/// A group is used by one thread at a time: a second one is detected and gets Error(argument). duplicate() makes
/// another group. After fork, calls in the child throw Error(unsupported) and destructors only unmap. Destroying a
/// group tells the others "left". A timeout, a lost peer or a cancelled wait poisons the group: every later call of
/// every rank throws that first cause at once.
class SyncGroup : public std::enable_shared_from_this<SyncGroup> {
 public:
  /// The largest record of all_gather, in bytes.
  static constexpr std::size_t max_record = 1024;
  using Nonce = std::array<std::byte, 16>;

  SyncGroup(const SyncGroup&) = delete;
  SyncGroup& operator=(const SyncGroup&) = delete;
  virtual ~SyncGroup() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// Throws Error(argument) if there is no such rank.
  [[nodiscard]] virtual const RankInfo& info(int rank) const = 0;
  /// Random, the same on all ranks, different for every group of every job.
  [[nodiscard]] virtual const Nonce& nonce() const noexcept = 0;
  /// "local", "single": for explain() and logs.
  [[nodiscard]] virtual std::string_view kind() const noexcept = 0;
  /// Whether this rank and `rank` can map the same memory. Local.
  [[nodiscard]] virtual bool shares_memory(int rank) const = 0;
  /// The host that `rank` is on, by a number that is the same on all ranks: those that have it in common share memory.
  /// Local.
  [[nodiscard]] virtual int host_of(int rank) const = 0;

  /// Collective. Returns when all ranks have come. Throws Error(timeout) with each missing rank's number, host, pid,
  /// phase and whether it lives, is stopped or dead; Error(peer_lost) within a second if one died; Error(cancelled);
  /// the group's first failure if it is poisoned.
  virtual void barrier(const WaitOptions& options = {}) = 0;
  /// Collective. Every rank gives `mine` (the same size on all, at most max_record); `all` (size() times that) gets
  /// them in rank order. Throws as barrier.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                          const WaitOptions& options = {}) = 0;
  /// To one other rank, which must call receive(); any length. Messages of 256 KiB may be under way from one rank to
  /// another. Beyond that, and for a longer message, send() returns when the message has been received. Messages move
  /// while their ranks wait for anything, in any group. No message waits behind one to another rank, or behind what
  /// gathers send. Throws as barrier, and Error(no_space) if no memory is left for messages: then the group has failed.
  virtual void send(int to, std::span<const std::byte> message, const WaitOptions& options = {}) = 0;
  /// The oldest message from one other rank. Throws as barrier, and Error(corrupt) if it is longer than `most`
  /// (nothing of that size is allocated).
  virtual std::vector<std::byte> receive(int from, std::uint64_t most, const WaitOptions& options = {}) = 0;
  /// Waits for something that the group does not know, such as a word of memory that these ranks share: until done()
  /// is true, which is asked between calls of sleep(longest), at most `longest` each. `on`: the ranks that it depends
  /// on; the wait ends if one of them is dead or has left, and its deadline counts from their last progress. Local;
  /// any thread, beside the one that uses the group, too. Throws as barrier.
  virtual void wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                          std::span<const int> on, const WaitOptions& options = {}) = 0;
  /// Collective. A group of the same ranks, with its own rounds and failures.
  virtual std::shared_ptr<SyncGroup> duplicate(const WaitOptions& options = {}) = 0;
  /// Collective over all ranks of this group. A group of the ranks of a list, in its order: list[0] is its rank 0. As
  /// in gathers, all members of a list pass the same one, lists have no rank twice and none in common, and a rank that
  /// is not in the list it passes (or passes an empty one) gets null. The new group has its own rounds and failures,
  /// and its messages call ranks by their numbers in the job (RankInfo::rank). Throws as barrier, and on all ranks
  /// alike Error(argument) on a list that cannot be, Error(rank_mismatch) if ranks of a list pass different ones;
  /// these leave the group usable. Over MPI no communicator is made, and the ranks may be on any hosts.
  virtual std::shared_ptr<SyncGroup> split(const RankList& ranks, const WaitOptions& options = {}) = 0;

  /// Makes `cause` the failure of all ranks, if there is none yet. Local, any thread.
  virtual void poison(const Error& cause) noexcept = 0;
  /// The failure that poisoned the group. Local, any thread.
  [[nodiscard]] virtual std::optional<Error> failure() const = 0;
  /// Tells waiting ranks that this one is busy, not stuck: called between pieces of long work. Local, cheap.
  virtual void progress() noexcept = 0;

  /// The default deadline: set here, else MUSTER_TIMEOUT (seconds), else 10 minutes.
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const noexcept = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;

 private:
  friend class sync::Group;  // the base of all kinds of groups
  SyncGroup() = default;
};

/// The group of all ranks of this job, made at the first call and the same later on. In this order (docs/mpi.md):
/// set_world(); MPI that runs already; mpiexec and srun, by libmuster-mpi, which is loaded then and ends MPI at exit;
/// `muster run` and torchrun, between hosts by MUSTER_WORKSPACE or TCP (docs/tcp.md); a step of Slurm; else one
/// process. Collective at the first call. Throws Error(timeout) with the ranks that never came, Error(version),
/// Error(rank_mismatch) on double ranks or different sizes, Error(argument) on variables that do not parse or
/// contradict each other, Error(unsupported) if there is no way to ranks of other hosts, or libmuster-mpi is missing.
std::shared_ptr<SyncGroup> world();

/// Makes `group` what world() returns. Null: the next world() looks at the environment again.
void set_world(std::shared_ptr<SyncGroup> group);

/// A group of this process alone.
std::shared_ptr<SyncGroup> single_group();

struct LocalGroupOptions {
  std::string key;  ///< what all ranks of the group know and no other job on this host does
  int rank = 0;
  int size = 1;
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the rendezvous, and the group's default after it
  /// What messages and errors call the ranks, where they are some of a larger job: one number a rank; empty: 0, 1, ...
  std::vector<int> numbers = {};
};

/// A group of `size` processes on this host, found through a Unix socket in the abstract namespace whose name is made
/// of `key` and the uid; peers of another uid are refused. A group of hundreds of ranks needs more open files than many
/// systems allow at first: their soft limit is raised, at most to the hard one. Collective. Throws as world().
std::shared_ptr<SyncGroup> local_group(const LocalGroupOptions& options);

}  // namespace muster

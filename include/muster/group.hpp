// SPDX-License-Identifier: Apache-2.0
#pragma once
// Group: the ranks of an exchange and their basic operations (barrier, all-gather of a small record, point-to-point
// messages). Every wait has a deadline. A timeout names the missing ranks. A failure of one rank reaches all ranks.
// Semantics: the "barrier sync group" of ModelOpt's gathers, and MPI communicators for rank, size and duplicate.

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

/// Identifies the process of a rank.
struct RankInfo {
  int global_rank = 0;   ///< the number of the rank in its job; error messages use it
  std::string host;      ///< host name, used only in error messages
  std::int64_t pid = 0;  ///< the process ID in the rank's own PID namespace
};

/// Options of waits.
struct WaitOptions {
  /// The longest wait without progress of the awaited ranks. Unset: the default of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::stop_token stop = {};  ///< a stop request cancels the wait, and so aborts the group
  /// The operation that this wait belongs to, for error messages ("barrier", "gather: round 1"). It must be static
  /// text, because only the pointer is stored.
  const char* phase = "barrier";
};

namespace group {
class BaseGroup;
}

class Group;

/// The type of all_ranks.
struct AllRanks {};
/// Selects all ranks of the group that a call uses, in order: 0, 1, ...
inline constexpr AllRanks all_ranks;

/// A list of ranks as an argument of a call: all_ranks, `{0, 2}`, a vector, an array or a span. It refers to the
/// memory of the caller and does not copy the numbers, so do not store it.
class RankList {
 public:
  /// Selects all ranks.
  RankList(AllRanks) noexcept : is_all_(true) {}
  /// Refers to the ranks of a list in braces.
  RankList(std::initializer_list<int> ranks) noexcept : ranks_(std::data(ranks), ranks.size()) {}
  /// Refers to the ranks in a vector, an array or a span.
  template <std::convertible_to<std::span<const int>> List>
  RankList(const List& ranks) noexcept : ranks_(ranks) {}

  /// Returns the ranks of the list. For all_ranks they are stored in `group`, which must outlive the span.
  [[nodiscard]] std::span<const int> in(const Group& group) const noexcept;

 private:
  std::span<const int> ranks_;
  bool is_all_ = false;
};

/// A group of ranks that exchange data. Only one thread may use a group at a time; a second thread gets
/// Error(invalid_argument). Use duplicate() to get another group. After fork, calls in the child throw
/// Error(unsupported), and destructors only unmap memory. Destroying a group reports to the other ranks that this one
/// has left. A timeout, a lost peer or a cancelled wait aborts the group: every later call on every rank throws that
/// first error at once.
///
/// A collective call must be made by all ranks of the group, in the same order. A local call involves only the calling
/// rank. `rank` arguments are numbers in this group, from 0 to size() - 1.
class Group : public std::enable_shared_from_this<Group> {
 public:
  /// The size limit of a record of all_gather(), in bytes.
  static constexpr std::size_t max_record = 1024;
  /// Random bytes that identify a group (nonce()).
  using Nonce = std::array<std::byte, 16>;

  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  virtual ~Group() = default;

  /// Returns the number of this rank in the group. Local.
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// Returns the host and process of `rank`. Throws Error(invalid_argument) if the group has no such rank. Local.
  [[nodiscard]] virtual const RankInfo& info(int rank) const = 0;
  /// Returns random bytes that are the same on all ranks and differ for every group of every job. Local.
  [[nodiscard]] virtual const Nonce& nonce() const noexcept = 0;
  /// Returns the kind of the group, such as "local" or "single", for explain() and logs.
  [[nodiscard]] virtual std::string_view kind() const noexcept = 0;
  /// Returns whether this rank and `rank` can map the same memory. Local.
  [[nodiscard]] virtual bool shares_memory(int rank) const = 0;
  /// Returns the number of the host that `rank` runs on. The numbers are the same on all ranks. Ranks with the same
  /// number share memory. Local.
  [[nodiscard]] virtual int host_of(int rank) const = 0;

  /// Returns when all ranks have entered the barrier. Collective. Throws Error(timeout) with the number, host, pid and
  /// phase (WaitOptions) of each missing rank, and whether it is alive, stopped or dead. Throws Error(peer_lost) within
  /// a second if a rank died (if its whole host became unreachable, the deadline applies). Throws Error(cancelled)
  /// after a stop request. If the group has failed, throws its first error.
  virtual void barrier(const WaitOptions& options = {}) = 0;
  /// Gathers one record per rank on all ranks. Collective. `mine` has the same size on all ranks, at most max_record
  /// bytes. `all` has size() times that size and receives the records in rank order. Throws as barrier().
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                          const WaitOptions& options = {}) = 0;
  /// Sends a message of any length to one other rank, which must call receive(). The buffer from one rank to another
  /// holds 256 KiB of messages. If the message does not fit into the free part of the buffer, send() waits until the
  /// receiver has received it. Messages make progress while their ranks wait for anything, in any group. Messages to
  /// different ranks, and messages and gathers, do not block each other. Throws as barrier(). Throws
  /// Error(out_of_space) if no memory is left for messages; the group has then failed.
  virtual void send(int to, std::span<const std::byte> message, const WaitOptions& options = {}) = 0;
  /// Returns the oldest unreceived message from one other rank. Throws as barrier(). Throws Error(corrupt) if the
  /// message is longer than `most` bytes; no memory of that size is allocated.
  virtual std::vector<std::byte> receive(int from, std::uint64_t most, const WaitOptions& options = {}) = 0;
  /// Waits for a condition that is outside the group, such as a change in memory that ranks share. The call evaluates
  /// done() until it returns true, and calls sleep(longest) in between, which must return after at most `longest`. `on`
  /// lists the ranks that the condition depends on. The wait fails if one of them dies or leaves, and the deadline
  /// counts from their last progress. Local. It may be called on any thread, also while another thread uses the group.
  /// Throws as barrier().
  virtual void wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                          std::span<const int> on, const WaitOptions& options = {}) = 0;
  /// Returns a group of the same ranks with separate rounds and failures. Collective. Throws as barrier().
  virtual std::shared_ptr<Group> duplicate(const WaitOptions& options = {}) = 0;
  /// Returns a group of the ranks of a list, in the order of the list: list[0] becomes its rank 0. Collective over all
  /// ranks of this group. As in gathers, all members of a list pass the same list, and lists are disjoint and without
  /// duplicates. A rank that is not in the list it passes, or passes an empty list, gets null. The new group has
  /// separate rounds and failures. Its messages use the numbers of the ranks in the job (RankInfo::global_rank).
  ///
  /// Throws as barrier(). Throws on all ranks alike Error(invalid_argument) if a list is invalid, and
  /// Error(rank_mismatch) if members of a list pass different lists; this group remains usable after both. The ranks
  /// may be on any hosts. Over MPI, no new communicator is created.
  virtual std::shared_ptr<Group> split(const RankList& ranks, const WaitOptions& options = {}) = 0;

  /// Aborts the group: `cause` becomes the failure of all ranks, unless the group has already failed. Local; any
  /// thread.
  virtual void abort(const Error& cause) noexcept = 0;
  /// Returns the error that aborted the group, or nullopt. Local; any thread.
  [[nodiscard]] virtual std::optional<Error> error() const = 0;
  /// Reports to waiting ranks that this rank is busy and not stuck. Call it between pieces of long work. Local, cheap.
  virtual void progress() noexcept = 0;

  /// Returns the default deadline of waits: the value of set_timeout(), else MUSTER_TIMEOUT (seconds), else 10 minutes.
  /// Local.
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const noexcept = 0;
  /// Sets the default deadline of waits on this rank. Local.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;

 private:
  friend class group::BaseGroup;  // the base of all kinds of groups
  Group() = default;
};
/// The name of the class in the design of ModelOpt's exchange.
using SyncGroup = Group;

/// Returns the group of all ranks of this job. The first call forms the group and is collective; later calls return the
/// same group. The first entry of this list that applies determines the group (docs/explanation/mpi-and-tcp.md):
/// - the group that was passed to set_world();
/// - MPI, if the program has already initialized it and libmuster-mpi is loaded (a wheel contains that code);
/// - a group of this process alone, if MUSTER_STANDALONE is 1;
/// - mpiexec, or srun with a PMI, through libmuster-mpi, which is loaded at that time and finalizes MPI at exit;
/// - `muster run` and torchrun, by RANK and WORLD_SIZE; several hosts then use MUSTER_WORKSPACE or TCP;
/// - a step of Slurm without a PMI;
/// - otherwise a group of this process alone.
///
/// Throws Error(timeout) with the ranks that did not arrive; Error(version); Error(rank_mismatch) if two processes have
/// the same rank or ranks disagree about the size; Error(invalid_argument) if environment variables are malformed or
/// contradict each other; Error(unsupported) if ranks of other hosts cannot be reached or libmuster-mpi is missing.
std::shared_ptr<Group> world();

/// Makes `group` the result of world(). Null: the next call of world() reads the environment again. Local.
void set_world(std::shared_ptr<Group> group);

/// Returns a group of this process alone. Local.
std::shared_ptr<Group> single_group();

/// Options of local_group().
struct LocalGroupOptions {
  std::string key;  ///< identifies the group: the same on all its ranks, and different from other jobs on this host
  /// The rank of this process.
  int rank = 0;
  /// The number of ranks.
  int size = 1;
  /// The longest wait for the other ranks in this call; afterwards the default deadline of the group. Unset:
  /// MUSTER_TIMEOUT (seconds), else 10 minutes.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// The numbers of the ranks in their job, one per rank, for error messages. Empty: 0, 1, ...
  std::vector<int> global_ranks = {};
};

/// Returns a group of `size` processes on this host. Collective. They meet at a Unix socket in the abstract namespace,
/// whose name contains `key` and the user ID. Processes of another user are rejected. A group of hundreds of ranks
/// needs more file descriptors than the usual soft limit allows. The call therefore raises the soft limit, at most to
/// the hard limit. Throws as world().
std::shared_ptr<Group> local_group(const LocalGroupOptions& options);

}  // namespace muster

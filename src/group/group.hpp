// SPDX-License-Identifier: Apache-2.0
#pragma once
// BaseGroup: the common base of all kinds of groups. It adds the library's internal functions to Group: internal
// messages, state of higher layers, companions, and memory of other ranks.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include "muster/group.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/base/function_ref.hpp"
#include "src/group/host_fold.hpp"
#include "src/group/mail.hpp"
#include "src/group/rank_table.hpp"
#include "src/trace/span.hpp"

namespace muster::group {

struct Peers;
class Region;

/// The number of the layouts of the control block and of the messages of rounds. A change of one of them raises it. A
/// build without this number reads its number of ranks here, which is never so large.
inline constexpr std::uint32_t group_layout = 1'000'002;

/// The head of a packet. Its contents are defined by the sender.
using PacketHead = std::array<std::byte, 32>;
/// Called with the head of a packet and the length of the rest. Returns memory of exactly that length.
using PacketPlace = FunctionRef<std::span<std::byte>(const PacketHead& head, std::size_t bytes)>;

/// Whether the process of a rank lives. It outlasts the group, so that memory lent to a dead rank can be taken back. If
/// `peers` is null, the rank is never reported dead.
class PeerLiveness {
 public:
  PeerLiveness(std::shared_ptr<const Peers> peers, int rank) : peers_(std::move(peers)), rank_(rank) {}
  /// Returns true if the process has ended. Local, never waits, any thread.
  [[nodiscard]] bool is_dead() const noexcept;

 private:
  std::shared_ptr<const Peers> peers_;
  int rank_;
};

class BaseGroup : public Group {
 public:
  [[nodiscard]] int rank() const noexcept final { return rank_; }
  [[nodiscard]] int size() const noexcept final { return static_cast<int>(ranks_->size()); }
  /// Returns whether this process created the group (false in a forked child).
  [[nodiscard]] bool is_owner_process() const noexcept;
  [[nodiscard]] const RankInfo& info(int rank) const final;
  [[nodiscard]] const Nonce& nonce() const noexcept final { return nonce_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept final { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) final;
  /// Operations for trace spans: operations() counts those that all ranks take part in, and some_operation() is for
  /// those of some ranks.
  [[nodiscard]] trace::Operations& operations() noexcept { return operations_; }
  [[nodiscard]] trace::OperationId some_operation() const noexcept { return {operations_.group, 0}; }
  /// Returns the messages of this group. Only the thread that holds the group may call its functions.
  [[nodiscard]] Mail& mail() noexcept { return mail_; }
  /// Returns all ranks: 0, 1, ...
  [[nodiscard]] std::span<const int> all() const noexcept { return ranks_->all(); }
  /// Returns the ranks. Duplicates share this table.
  [[nodiscard]] const std::shared_ptr<const RankTable>& ranks() const noexcept { return ranks_; }
  /// Returns the shared memory of `rank`, or null if it shares none with this rank or the group has one rank. Local.
  [[nodiscard]] virtual std::shared_ptr<Region> region_of(int rank) const;
  /// Returns the liveness of a rank that shares memory with this one. Any other rank is never reported dead here.
  /// Local.
  [[nodiscard]] virtual std::shared_ptr<const PeerLiveness> liveness(int rank) const;
  // The defaults are for ranks that share no memory.
  [[nodiscard]] bool shares_memory(int rank) const override {
    (void)info(rank);
    return rank == rank_;
  }
  [[nodiscard]] int host_of(int rank) const override {
    (void)info(rank);
    return rank;
  }

  void barrier(const WaitOptions& options = {}) final;
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options = {}) final;
  void send(int to, std::span<const std::byte> message, const WaitOptions& options = {}) final;
  void send(int to, std::span<const std::byte> message, const WaitOptions& options, Subject subject);
  std::vector<std::byte> receive(int from, std::uint64_t most, const WaitOptions& options = {}) final;
  std::vector<std::byte> receive(int from, std::uint64_t most, const WaitOptions& options, Subject subject);
  void wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                  std::span<const int> on, const WaitOptions& options = {}) final;
  std::shared_ptr<Group> duplicate(const WaitOptions& options = {}) final;
  std::shared_ptr<Group> split(const RankList& ranks, const WaitOptions& options = {}) final;

  /// Holds the group for one thread, whether or not the group has failed. Nests within a thread. A thread that only
  /// moves the group's messages (`progress`) holds it briefly, and users wait for it.
  class Hold {
   public:
    enum class Kind : std::uint8_t { use, progress };
    explicit Hold(BaseGroup& group, Kind kind = Kind::use) noexcept : group_(group), holds_(group.hold(kind)) {}
    ~Hold() {
      if (holds_) group_.let_go();
    }
    Hold& operator=(Hold&&) = delete;
    /// False if another thread holds the group.
    explicit operator bool() const noexcept { return holds_; }

   private:
    BaseGroup& group_;
    bool holds_;
  };

  // Packets, which carry the messages. A packet arrives completely or not at all. Packets of at most longest_packet()
  // bytes from one rank to another arrive in order. The thread that holds the group makes these calls; `to` and `from`
  // are other ranks.

  /// Returns the maximum length of a packet, without its head.
  [[nodiscard]] virtual std::size_t longest_packet() const noexcept { return 64 << 10; }
  /// Returns the maximum length of a packet that the receiver has requested, and so need not keep. Shorter packets may
  /// overtake it.
  [[nodiscard]] virtual std::size_t longest_piece(int) const { return longest_packet(); }
  /// Sends a packet if there is room for it; returns false if not. Throws as send().
  bool try_send(int to, const PacketHead& head, std::span<const std::byte> packet);
  /// Returns whether all packets that try_send accepted for that rank are delivered without this rank, even if it no
  /// longer calls the library. After forward_packets(), every rank keeps calling the library.
  [[nodiscard]] virtual bool packets_have_left(int) { return true; }
  /// All ranks call this and then run a round. Only then may a rank send the first message of the group. In a group of
  /// many hosts, packets then pass through other ranks, so that a rank has connections to few ranks. From then on, each
  /// rank must stay inside the library until all ranks have received all messages, and must limit its messages that are
  /// not yet received. Local.
  virtual void forward_packets() {}
  /// Appends the ranks from which a packet may have arrived. If each query is a call of the transport, one call queries
  /// all ranks. Returns whether packets have been forwarded.
  bool collect_packets(std::vector<int>& from);
  /// Receives the next packet if one has arrived; returns false if not. An error thrown by `place` fails the group.
  bool try_receive(int from, const PacketPlace& place);
  /// Returns whether this rank knows of a failure of the group. Never waits.
  [[nodiscard]] virtual bool has_failure() const noexcept = 0;
  /// Returns whether the calling thread may send and receive packets now.
  [[nodiscard]] virtual bool may_move() const noexcept { return true; }
  /// Waits until done() returns true; done() sends and receives packets. `on`: the ranks that the result depends on.
  /// Throws as wait_until.
  void wait_for_packets(const std::function<bool()>& done, std::span<const int> on, const WaitOptions& options);

  /// Returns whether the group has several hosts, so that fold() is possible. The same on all ranks.
  [[nodiscard]] virtual bool has_folds() const noexcept { return false; }
  /// Collective, if has_folds(). Runs one round over the tree of hosts, with one record per rank and the messages of
  /// `fold`. Returns the message of down() to the ranks of this host. Throws as all_gather().
  std::vector<std::byte> fold(std::span<const std::byte> mine, HostFold& fold, const WaitOptions& options);
  /// Collective. Returns on all ranks whether any rank passes true. Throws as all_gather().
  [[nodiscard]] bool any(bool mine, const WaitOptions& options);

  void abort(const Error& cause) noexcept final;
  [[nodiscard]] std::optional<Error> error() const final;

  /// Collective. Returns a duplicate for one long operation of this group. The same thread uses both in turn: progress
  /// on either counts for both. A failure of this group fails the companion, but not the reverse. A wait of the
  /// companion ends if any rank is dead, even one that it does not wait for.
  std::shared_ptr<BaseGroup> companion(const WaitOptions& options = {});

  /// Collective. Runs local work of a collective call. If it fails on some ranks, all ranks throw the error of the
  /// first of them. The failed rank reports its error before the others wait for it, so the group remains usable.
  template <class Work>
  void together(const WaitOptions& options, const Work& work) {
    std::optional<Error> trouble;
    try {
      work();
    } catch (const Error& error) {
      if (this->error()) throw;
      trouble = error;
    } catch (const std::bad_alloc&) {
      trouble = Error(ErrorKind::out_of_space, "out of memory");
    }
    agree(trouble, options);
  }
  /// Collective. The same for work that has already run: if `trouble` is set on any rank, all ranks throw.
  void agree(const std::optional<Error>& trouble, const WaitOptions& options);
  /// Collective, for a rank that cannot make a call that begins with together(), such as duplicate() or split(). The
  /// rank calls this function instead. Throws `failure` on all ranks; the group remains usable.
  [[noreturn]] void refuse(const Error& failure, const WaitOptions& options = {});

  /// Returns a number for the collective call that begins. It is the same on all ranks, because each rank takes part in
  /// every round, even in a round that fails because the ranks are in different calls. Local.
  [[nodiscard]] std::uint64_t call_number() const noexcept { return rounds() + 1; }

  /// Returns state that a higher layer keeps with the group (for example its pool), one object per type. It is created
  /// at first use and destroyed with its last owner. Local.
  template <class State>
  std::shared_ptr<State> extension() {
    static const char key = 0;
    return std::static_pointer_cast<State>(extension(&key, [] { return std::make_shared<State>(); }));
  }

 protected:
  /// `peers` is null if this process cannot see that other ranks have ended.
  BaseGroup(int rank, std::shared_ptr<const RankTable> ranks, Nonce nonce, std::chrono::milliseconds timeout,
            std::shared_ptr<const Peers> peers = nullptr);
  /// Between these two calls, every wait of this process moves the group's messages. The destructor of each kind of
  /// group calls end_progress() first. That call begins by ending the extensions of higher layers, which may still use
  /// the whole group.
  void begin_progress();
  void end_progress() noexcept;

  /// As abort() and error(), but called only in the process that created the group.
  virtual void do_abort(const Error& cause) noexcept = 0;
  [[nodiscard]] virtual std::optional<Error> do_failure() const = 0;
  /// Returns how many rounds this rank has begun.
  [[nodiscard]] virtual std::uint64_t rounds() const noexcept = 0;
  virtual void do_barrier(const WaitOptions& options) = 0;
  virtual void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) = 0;
  virtual std::vector<std::byte> do_fold(std::span<const std::byte> mine, HostFold& fold, const WaitOptions& options);
  virtual void do_wait_until(const std::function<bool()>& done,
                             const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                             const WaitOptions& options) = 0;
  virtual bool do_try_send(int to, const PacketHead& head, std::span<const std::byte> packet) = 0;
  /// Appends all other ranks.
  virtual bool do_collect_packets(std::vector<int>& from);
  virtual bool do_try_receive(int from, const PacketPlace& place) = 0;
  virtual void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                                   const WaitOptions& options) = 0;
  enum class Tie : std::uint8_t { none, companion };
  /// Some ranks of this group that form a new group. Several parts may be formed in one call.
  struct SplitPart {
    std::span<const int> members;  ///< in the order of the new group; empty on a rank that is in no part
    int position = -1;             ///< position of this rank in `members`; -1: in no part
  };
  /// Collective over this group. Returns null on a rank that is in no part.
  virtual std::shared_ptr<BaseGroup> make_part(const SplitPart& part, Tie tie, const WaitOptions& options) = 0;

 private:
  friend class GroupLock;
  bool hold(Hold::Kind kind) noexcept;
  void let_go() noexcept;
  /// Returns the error that calls in a forked child throw.
  [[nodiscard]] Error forked() const;
  std::shared_ptr<void> extension(const void* key, const std::function<std::shared_ptr<void>()>& make);
  SplitPart part_of(std::span<const int> ranks, const WaitOptions& options);
  int rank_;
  std::shared_ptr<const RankTable> ranks_;
  std::shared_ptr<const Peers> peers_;
  Nonce nonce_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::int64_t owner_pid_;
  trace::Operations operations_;
  // ID of the thread that holds the group, + 1 if it only moves messages; 0: no thread.
  std::atomic<std::uintptr_t> user_{0};
  int depth_ = 0;
  Mail mail_;
  ForkMutex extensions_mutex_;
  std::map<const void*, std::shared_ptr<void>> extensions_;
  // One per rank; a member, so that agree() allocates no memory if all ranks succeed.
  std::vector<std::uint32_t> statuses_;
};

/// Every Group is a BaseGroup: no class outside the library can derive from Group.
inline BaseGroup& inside(Group& group) noexcept {
  return static_cast<BaseGroup&>(group);
}
inline const BaseGroup& inside(const Group& group) noexcept {
  return static_cast<const BaseGroup&>(group);
}

/// Returns the number of ranks on the host of this rank, this rank included.
int ranks_of_host(const Group& group);

/// Holds the group for one thread during an operation of several calls. Nests within the thread. Throws as described at
/// Group.
class GroupLock {
 public:
  explicit GroupLock(Group& group);
  ~GroupLock();
  GroupLock& operator=(GroupLock&&) = delete;

 private:
  BaseGroup& group_;
};

}  // namespace muster::group

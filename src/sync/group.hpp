// SPDX-License-Identifier: Apache-2.0
#pragma once
// Group: what all kinds of groups have in common, and what the library does with a group beyond what programs do:
// messages of its own, state of higher layers, companions, memory of other ranks.

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

#include "muster/sync_group.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/base/function_ref.hpp"
#include "src/sync/mail.hpp"
#include "src/trace/span.hpp"

namespace muster::sync {

struct Peers;
class Region;

/// What begins a packet: whatever its sender means by it.
using PacketHead = std::array<std::byte, 32>;
/// Called with what a packet begins with and how long the rest is; returns room of just that length.
using PacketPlace = FunctionRef<std::span<std::byte>(const PacketHead& head, std::size_t bytes)>;

/// Whether a rank's process lives: outlasts the group, so that what was lent to a dead rank can be taken back. Without
/// peers: a rank that is never known to be dead here.
class PeerLiveness {
 public:
  PeerLiveness(std::shared_ptr<const Peers> peers, int rank) : peers_(std::move(peers)), rank_(rank) {}
  /// The process has ended. Local, never waits, any thread.
  [[nodiscard]] bool is_dead() const noexcept;

 private:
  std::shared_ptr<const Peers> peers_;
  int rank_;
};

class Group : public SyncGroup {
 public:
  [[nodiscard]] int rank() const noexcept final { return rank_; }
  [[nodiscard]] int size() const noexcept final { return static_cast<int>(ranks_.size()); }
  /// Whether this process made the group (false in a forked child).
  [[nodiscard]] bool is_owner_process() const noexcept;
  [[nodiscard]] const RankInfo& info(int rank) const final;
  [[nodiscard]] const Nonce& nonce() const noexcept final { return nonce_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept final { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) final;
  /// For spans: of the operations that all ranks are in together, and one that some are in.
  [[nodiscard]] trace::Operations& operations() noexcept { return operations_; }
  [[nodiscard]] trace::Operation some_operation() const noexcept { return {operations_.group, 0}; }
  /// All messages of this group. Its calls are made by the thread that holds the group.
  [[nodiscard]] Mail& mail() noexcept { return mail_; }
  /// 0, 1, ...
  [[nodiscard]] std::span<const int> all() const noexcept { return all_; }
  /// The shared memory of `rank`; null if it shares none with this one, and in a group of one. Local.
  [[nodiscard]] virtual std::shared_ptr<Region> region_of(int rank) const;
  /// Of a rank that shares memory with this one; another one is never known to be dead here. Local.
  [[nodiscard]] virtual std::shared_ptr<const PeerLiveness> liveness(int rank) const;
  // Of ranks that share no memory.
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
  std::shared_ptr<SyncGroup> duplicate(const WaitOptions& options = {}) final;
  std::shared_ptr<SyncGroup> split(const RankList& ranks, const WaitOptions& options = {}) final;

  /// Holds the group for one thread, without a look at its failure. Nests within a thread. A thread that only lets the
  /// group's mail move holds it for a moment: users wait for that.
  class Hold {
   public:
    enum class Kind : std::uint8_t { use, progress };
    explicit Hold(Group& group, Kind kind = Kind::use) noexcept : group_(group), holds_(group.hold(kind)) {}
    ~Hold() {
      if (holds_) group_.let_go();
    }
    Hold& operator=(Hold&&) = delete;
    /// False if another thread has it.
    explicit operator bool() const noexcept { return holds_; }

   private:
    Group& group_;
    bool holds_;
  };

  // Packets, of which mail is made. Those from one rank to another come whole, and those of at most longest_packet()
  // bytes in order. Both calls are made by the thread that holds the group; `to` and `from` are other ranks.

  /// How long one can be, without its head.
  [[nodiscard]] virtual std::size_t longest_packet() const noexcept { return 64 << 10; }
  /// Likewise, of what is known to be wanted: nobody has to keep it. Shorter ones may overtake it.
  [[nodiscard]] virtual std::size_t longest_piece(int) const { return longest_packet(); }
  /// Sends one, if there is room for it; false if there is not. Throws as send().
  bool try_send(int to, const PacketHead& head, std::span<const std::byte> packet);
  /// Whether all that try_send took for that rank goes on without this one, which may stay outside of the library then.
  [[nodiscard]] virtual bool packets_have_left(int) { return true; }
  /// Adds the ranks from which a packet may have come. Where a question costs a call, one call asks for all ranks.
  void collect_packets(std::vector<int>& from);
  /// Takes the next one, if it has come; false if not. What `place` throws is the failure of the group.
  bool try_receive(int from, const PacketPlace& place);
  /// Whether this rank knows of a failure of the group. Never waits.
  [[nodiscard]] virtual bool has_failure() const noexcept = 0;
  /// Whether the calling thread may send and receive packets now.
  [[nodiscard]] virtual bool may_move() const noexcept { return true; }
  /// Waits until done(), which makes those calls for ranks of `on`: they are who it depends on. Throws as wait_until.
  void wait_for_packets(const std::function<bool()>& done, std::span<const int> on, const WaitOptions& options);

  void poison(const Error& cause) noexcept final;
  [[nodiscard]] std::optional<Error> failure() const final;

  /// Collective. A duplicate for one long operation of this group, used in turns with it by the same thread: progress
  /// on either counts for both, a failure of this group is one of the companion (but not the other way round), and a
  /// wait of the companion ends if any rank is dead, waited for or not.
  std::shared_ptr<Group> companion(const WaitOptions& options = {});

  /// Collective. Runs local work of a collective call. If it fails on some ranks, all throw the first one's error:
  /// who cannot go on says so before the others wait for it, and the group goes on.
  template <class Work>
  void together(const WaitOptions& options, const Work& work) {
    std::optional<Error> trouble;
    try {
      work();
    } catch (const Error& error) {
      if (failure()) throw;
      trouble = error;
    } catch (const std::bad_alloc&) {
      trouble = Error(ErrorKind::no_space, "out of memory");
    }
    agree(trouble, options);
  }
  /// Collective. The same for work that has been run: throws on all ranks if there is trouble on any.
  void agree(const std::optional<Error>& trouble, const WaitOptions& options);
  /// Collective, in place of duplicate(), split() or another call that begins with together(): this rank cannot make
  /// the call. Throws `failure` on all ranks; the group remains usable.
  [[noreturn]] void refuse(const Error& failure, const WaitOptions& options = {});

  /// A number for the collective call that begins: the same on all ranks, because each takes part in every round, also
  /// in one that ends because the ranks are in different calls. Local.
  [[nodiscard]] std::uint64_t call_number() const noexcept { return rounds() + 1; }

  /// State that a higher layer keeps with the group (its pool), one of each type: made at first use and destroyed with
  /// the last owner. Local.
  template <class State>
  std::shared_ptr<State> extension() {
    static const char key = 0;
    return std::static_pointer_cast<State>(extension(&key, [] { return std::make_shared<State>(); }));
  }

 protected:
  /// `peers`: null of ranks whose end is not seen here.
  Group(int rank, std::vector<RankInfo> ranks, Nonce nonce, std::chrono::milliseconds timeout,
        std::shared_ptr<const Peers> peers = nullptr);
  /// Between these two calls the waits of this process let the group's mail move. The last one is the first thing that
  /// the destructor of each kind of group does. Before all else it ends what higher layers keep with the group, which
  /// may use all of it.
  void begin_progress();
  void end_progress() noexcept;

  /// As poison() and failure(), of the process that made the group.
  virtual void do_poison(const Error& cause) noexcept = 0;
  [[nodiscard]] virtual std::optional<Error> do_failure() const = 0;
  /// How many rounds this rank has begun.
  [[nodiscard]] virtual std::uint64_t rounds() const noexcept = 0;
  virtual void do_barrier(const WaitOptions& options) = 0;
  virtual void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) = 0;
  virtual void do_wait_until(const std::function<bool()>& done,
                             const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                             const WaitOptions& options) = 0;
  virtual bool do_try_send(int to, const PacketHead& head, std::span<const std::byte> packet) = 0;
  /// Adds all other ranks.
  virtual void do_collect_packets(std::vector<int>& from);
  virtual bool do_try_receive(int from, const PacketPlace& place) = 0;
  virtual void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                                   const WaitOptions& options) = 0;
  enum class Tie : std::uint8_t { none, companion };
  /// Some ranks of this group that become one. Several such parts are made at the same time.
  struct Part {
    std::span<const int> members;  ///< in the order that they have there; empty on a rank that is in no part
    int position = -1;             ///< this rank's among them; -1: in no part
  };
  /// Collective over this group. Null on a rank that is in no part.
  virtual std::shared_ptr<Group> make_part(const Part& part, Tie tie, const WaitOptions& options) = 0;

 private:
  friend class Use;
  bool hold(Hold::Kind kind) noexcept;
  void let_go() noexcept;
  /// What calls in a forked child throw.
  [[nodiscard]] Error forked() const;
  std::shared_ptr<void> extension(const void* key, const std::function<std::shared_ptr<void>()>& make);
  Part part_of(std::span<const int> ranks, const WaitOptions& options);
  int rank_;
  std::vector<RankInfo> ranks_;
  std::shared_ptr<const Peers> peers_;
  std::vector<int> all_;
  Nonce nonce_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::int64_t owner_pid_;
  trace::Operations operations_;
  std::atomic<std::uintptr_t> user_{0};  // the thread inside, and 1 if it only lets mail move; 0: none
  int depth_ = 0;
  Mail mail_;
  ForkMutex extensions_mutex_;
  std::map<const void*, std::shared_ptr<void>> extensions_;
  std::vector<std::uint32_t> statuses_;  // of all ranks; here so that agree() needs no memory if all are well
};

/// Every group is one: nobody else can derive from SyncGroup.
inline Group& inside(SyncGroup& group) noexcept {
  return static_cast<Group&>(group);
}
inline const Group& inside(const SyncGroup& group) noexcept {
  return static_cast<const Group&>(group);
}

/// Holds the group for one thread and one operation made of several calls; nests within the thread. Throws as
/// described at SyncGroup.
class Use {
 public:
  explicit Use(SyncGroup& group);
  ~Use();
  Use& operator=(Use&&) = delete;

 private:
  Group& group_;
};

}  // namespace muster::sync

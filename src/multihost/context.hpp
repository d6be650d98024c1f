// SPDX-License-Identifier: Apache-2.0
#pragma once
// Context: the state that a group of several hosts shares with its duplicates: the transport, the control messages
// between rounds (Control), and the protocol that ends them.
//
// MPI requires that every message is received before it is finalised. A rank that closes its connections before the
// other ranks are finished looks like a rank that died. So a context ends when its last group is destroyed, or when the
// transport or the process ends:
//  1. Control messages, except those about failures, complete only when they have been received (SendEnd::taken). So a
//     rank without open sends has no control message in flight.
//  2. The ranks form a tree (HostTree with ranks as nodes), so that no rank has a message from every other rank. A rank
//     without groups sends a disconnect message to the rank above, when all ranks below it have disconnected. If it
//     waits long for one of them, it reports the name of that rank upwards, so that rank 0 can name it.
//  3. Then it enters a barrier.
//  4. After the barrier no rank sends requests any more, and each rank drops the messages that have not been received.
//     So all messages that were sent before complete. A second barrier confirms that they have completed on all ranks.
//  5. Each rank cancels the receive that no message will match, drops the remains of failures, and closes the
//     transport.
// No rank waits for this protocol: it advances whenever any group is used. Only the end of the transport waits, with a
// deadline. It ends all groups that still exist, and waits until the groups of all ranks have ended (end_all).

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"
#include "src/multihost/deliveries.hpp"
#include "src/multihost/membership.hpp"
#include "src/multihost/transport.hpp"
#include "src/os/clock.hpp"

namespace muster::multihost {

using group::error_of;
using group::name_of;

/// A group of the context, which receives control messages.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  /// Called while the context is locked.
  virtual void take(const Control& control) = 0;
  /// Returns the decision about the group's failure, if this rank knows it. Called while the context is locked.
  [[nodiscard]] virtual std::optional<Error> decision() const = 0;
  /// Called when the transport ends: the group becomes unusable. Notifies the other ranks that this rank has left.
  virtual void end() noexcept = 0;
};

class Context : public std::enable_shared_from_this<Context> {
 public:
  Context(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout);

  [[nodiscard]] Transport& transport() const noexcept { return *transport_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Returns whether the calling thread may call the transport. False after the end of the transport.
  [[nodiscard]] bool may_call() const noexcept;
  /// Called when a thread begins to use a group. Throws as Connector::enter.
  void enter();
  void take_over() noexcept { transport_->take_over(); }

  /// Sets the ranks and their hosts, which are known after the rendezvous.
  void introduce(const HostsMembership& members);
  /// Returns whether there are ranks on other hosts.
  [[nodiscard]] bool has_other_hosts() const noexcept { return has_other_hosts_.load(); }
  /// Returns a group number that was never used on this rank.
  [[nodiscard]] int next_number() noexcept;
  /// Reserves a number that another rank proposes. Returns false if this rank may have used it already: threads that
  /// make several groups at once do so in a different order on each rank.
  [[nodiscard]] bool take_number(int number) noexcept;
  void add_group(int number, ControlListener& group);
  /// Begins the end of the context after the last group.
  void remove_group(int number) noexcept;
  /// Begins the end of the context when no group could be made.
  void retire() noexcept;

  /// Takes ownership of a send of a group that may be destroyed before the send completes. The context continues it.
  void adopt(int to, PendingTransfer send);
  /// Sends the message at once if this thread may call the transport. Otherwise a thread that may do so sends it.
  void tell(int rank, const Control& control);
  /// Advances the transport, and passes the received messages to the groups. Does nothing if this thread may not call
  /// the transport. Throws Error(io).
  void pump();
  /// Like pump(), but ignores errors: the next call that waits reports them.
  void try_pump() noexcept;
  /// Adds a hook, which is called whenever the transport advances, until its owner removes it. It must not throw, and
  /// must not call pump().
  void add_hook(const void* owner, std::function<void()> hook);
  void remove_hook(const void* owner);
  /// Reports deaths of ranks on this host to the groups of this rank.
  void look_for_the_dead();
  /// Asks up to three other ranks on the host of `rank` whether `rank` is dead. The group that waits need not have
  /// other live ranks on that host.
  void ask_about(int rank);
  /// The caller must hold lock().
  [[nodiscard]] Deliveries& deliveries() noexcept { return deliveries_; }
  /// Locks the state that take() changes.
  [[nodiscard]] std::unique_lock<RecursiveForkMutex> lock() { return std::unique_lock(mutex_); }
  [[nodiscard]] os::Clock::duration since_pumped() const noexcept;

  // The end.
  [[nodiscard]] bool is_retired() const noexcept { return stage_.load() != ConnectionStage::used; }
  /// Returns whether the context has been closed or abandoned.
  [[nodiscard]] bool has_ended() const noexcept { return stage_.load() >= ConnectionStage::closed; }
  [[nodiscard]] bool is_closed() const noexcept { return stage_.load() == ConnectionStage::closed; }
  /// Returns whether other ranks may have ended in order. They pass the second barrier only after all have entered it.
  [[nodiscard]] bool may_have_ended() const noexcept { return stage_.load() >= ConnectionStage::second_barrier; }
  /// Ends all groups of the context and retires it.
  void end_groups() noexcept;
  /// Executes the next step of the end, if it is possible. Gives up if a rank of this host has died.
  void advance() noexcept;
  /// Gives up if the context has not ended `waited` after the end of all groups. The warning names the missing ranks.
  void give_up_after(os::Clock::duration waited) noexcept;
  void give_up(const std::string& why) noexcept;
  /// Gives up a late end while the process continues. Does so only after a failure, and if the transport can be
  /// dropped.
  void give_up_if_late() noexcept;
  /// Returns how long this rank must not use the transport before it ends the transport; 0 if all ranks are on one
  /// host.
  [[nodiscard]] std::chrono::milliseconds rest() const noexcept;
  /// Called when a group has failed: the end then waits only briefly.
  void has_failed() noexcept;

  /// A route holds one of these while it transfers data. Waits on this host then advance the transport more often.
  class UnderWay {
   public:
    explicit UnderWay(Context& context) noexcept : context_(context) { context_.under_way_.fetch_add(1); }
    ~UnderWay() { context_.under_way_.fetch_sub(1); }
    UnderWay& operator=(UnderWay&&) = delete;

   private:
    Context& context_;
  };
  [[nodiscard]] bool is_under_way() const noexcept {
    return under_way_.load(std::memory_order_relaxed) != 0 || has_just_failed();
  }
  /// Returns whether a call failed a moment ago: the data that it promised to receive may still arrive.
  [[nodiscard]] bool has_just_failed() const noexcept;

 private:
  enum class ConnectionStage : std::uint8_t {
    used,
    disconnecting,
    first_barrier,
    draining,
    second_barrier,
    closing,
    closed,
    given_up
  };

  struct Sent {
    int to = 0;
    PendingTransfer message;
  };
  void open_inbox();
  bool has_mail();
  /// Handles a notice or a decision for one group.
  void take_failure(const Control& control);
  /// Runs a transport call for a message to `rank` for which no caller waits. If the transport can no longer reach the
  /// rank, reports its death to the groups, and messages to other ranks are not affected. Returns the result of the
  /// call, or true if it failed.
  template <class Call>
  bool reach(int rank, const Call& call);
  void take(const Control& control);
  /// Warns the other ranks that the end will not be orderly. The rank that notices it first sends the warning.
  void warn_others(const std::string& why);
  void step();
  /// Drops the messages that no receive has matched. Returns whether all messages that have begun to arrive are
  /// complete.
  bool sweep();
  /// Sends a message that another rank may need. This rank does not wait for it, and ignores errors.
  void reply(int rank, const Control& control) noexcept;
  /// Handles that this rank can no longer reach `rank`.
  void lose(int rank);
  [[nodiscard]] std::string name_of(int rank) const;
  [[nodiscard]] std::string missing() const;
  /// The ranks as nodes of a tree.
  [[nodiscard]] HostTree rank_tree() const noexcept { return {size_}; }
  /// Step 2. Sends the message of this rank if no rank below it is missing.
  void tell_end();
  /// Step 2. Reports a missing rank upwards.
  void tell_missing();
  [[nodiscard]] std::chrono::milliseconds patience() const noexcept;

  const std::shared_ptr<Transport> transport_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  std::atomic<int> under_way_{0};
  std::atomic<bool> failed_{false};
  std::atomic<os::Clock::time_point> last_failure_{};
  std::atomic<bool> has_other_hosts_{false};
  os::Clock::time_point retired_{};
  os::Clock::time_point second_barrier_since_{};
  os::Clock::duration second_barrier_took_{};
  std::atomic<ConnectionStage> stage_{ConnectionStage::used};
  std::atomic<std::int64_t> pumped_{0};

  // Recursive, because the handling of a message sends answers.
  RecursiveForkMutex mutex_;
  int next_number_ = 1;
  std::map<int, ControlListener*> groups_;
  std::map<const void*, std::function<void()>> hooks_;  // by owner
  std::vector<std::pair<int, Control>> outbox_;         // of threads that may not call the transport
  std::vector<Sent> sends_;                             // of control messages
  std::vector<Sent> adopted_;                           // of groups
  std::shared_ptr<Control> inbox_memory_;
  PendingTransfer inbox_;
  std::shared_ptr<const group::RankTable> ranks_;  // null before introduce()
  // The ranks of this host that are not known to be dead.
  std::map<int, std::shared_ptr<const group::PeerLiveness>> neighbours_;
  std::shared_ptr<const Hosts> hosts_;
  Deliveries deliveries_;
  std::vector<std::pair<std::shared_ptr<Control>, PendingTransfer>>
      late_;  // messages that arrived while the inbox was in use
  /// The ranks directly below this one that have not disconnected, with the rank that each of them waits for. Without a
  /// report, this is the rank itself.
  std::map<int, int> connected_below_;
  bool has_told_end_ = false;
  bool is_late_told_ = false;
  PendingTransfer barrier_;
  std::optional<os::Clock::time_point> death_seen_;
  std::vector<int> dead_;      // dead ranks of this host
  std::size_t passed_on_ = 0;  // the number of those that have been reported to the groups
  os::Clock::time_point looked_{};
};

// All contexts of this process, by the kind of their transport (context.cpp).

/// Keeps the context until its transport ends at the latest.
void keep(std::shared_ptr<Context> context);
/// Advances the end of contexts without groups. Never waits. The calling thread must be one that may call the
/// transport.
void advance_endings(std::string_view kind) noexcept;
/// Ends all groups of this process and waits for the other ranks to do the same. Waits up to a group's timeout, or 2 s
/// if a group has failed or a rank of this host is dead. Returns whether all contexts have ended in order.
bool end_all(std::string_view kind) noexcept;

}  // namespace muster::multihost

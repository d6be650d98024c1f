// SPDX-License-Identifier: Apache-2.0
#pragma once
// Context: what a group of several hosts and its duplicates have in common: the transport, the small messages between
// rounds (Control: who has failed, who has left, whether somebody moves), and how all of it ends.
//
// MPI wants every message to be received before it ends, and a rank that closes its connections before all others are
// through looks like one that died. So a context ends when its last group is gone, or when the transport or the process
// ends:
//  1. Control messages, but for those about failures, are sent such that they have finished only when they are received
//     (Finished::taken): who has none open has nothing on its way.
//  2. Who has no group any more tells rank 0 that it disconnects.
//  3. Rank 0, which knows who is missing, enters a barrier when all have said so; the others enter it at once.
//  4. When it is through, nobody asks anybody any more, and messages that have not been received are dropped. So what
//     was sent meanwhile finishes; a second barrier says that all has.
//  5. The receive that nobody will answer is taken back, what a failure left behind is dropped, the transport is
//     closed.
// Until then all of this goes on by the way, whenever some group is used: nobody waits for it. Only the end of the
// transport waits, with a deadline: it ends all groups that still are, and waits until all ranks' have (end_all).

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
#include "src/hosts/control.hpp"
#include "src/hosts/deliveries.hpp"
#include "src/hosts/hosts.hpp"
#include "src/hosts/transport.hpp"
#include "src/os/clock.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/group.hpp"

namespace muster::hosts {

using sync::error_of;
using sync::name_of;

/// A group of the context, as control messages reach it.
class Listener {
 public:
  virtual ~Listener() = default;
  /// Called with the context locked.
  virtual void take(const Control& control) = 0;
  /// Called likewise. The decision about the group's failure, if this rank knows it.
  [[nodiscard]] virtual std::optional<Error> decision() const = 0;
  /// The transport ends: the group cannot be used any more. Tells others that this rank has left.
  virtual void end() noexcept = 0;
};

class Context : public std::enable_shared_from_this<Context> {
 public:
  Context(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout);

  [[nodiscard]] Transport& transport() const noexcept { return *transport_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Whether the calling thread may call the transport, and this has not ended.
  [[nodiscard]] bool may_call() const noexcept;
  /// The calling thread uses a group. Throws as Transport::enter.
  void enter();
  void take_over() noexcept { transport_->take_over(); }

  /// Who the ranks are, and where: known after the meeting.
  void introduce(std::vector<RankInfo> ranks, const Hosts& hosts);
  /// There are ranks on other hosts.
  [[nodiscard]] bool has_other_hosts() const noexcept { return has_other_hosts_.load(); }
  /// A group's number that was never given on this rank.
  [[nodiscard]] int next_number() noexcept;
  /// The same, for a number that another rank has given. False if it may have been given here: threads that make
  /// several groups at once do so in another order on each rank.
  [[nodiscard]] bool take_number(int number) noexcept;
  void add_group(int number, Listener& group);
  /// The last one begins the end of the context.
  void remove_group(int number) noexcept;
  /// No group came to be.
  void retire() noexcept;

  /// A send of a group, which may be gone before it has finished: it goes on whenever the context does.
  void adopt(int to, Pending send);
  /// Sent at once if this thread may call the transport, else by one that may.
  void tell(int rank, const Control& control);
  /// Lets the transport go on, and hands what has come to the groups. Nothing if this thread may not. Throws Error(io).
  void pump();
  /// The same; what fails is told by the next call that waits.
  void try_pump() noexcept;
  /// `hook` is called whenever the transport goes on, until its owner takes it back. It throws nothing, and never
  /// pumps.
  void add_hook(const void* owner, std::function<void()> hook);
  void remove_hook(const void* owner);
  /// Passes on to the groups of this rank which ranks of this host have died.
  void look_for_the_dead();
  /// Asks some other ranks of that rank's host whether it is dead. Its groups need not have a rank there that is not.
  void ask_about(int rank);
  /// Guarded by lock().
  [[nodiscard]] Deliveries& deliveries() noexcept { return deliveries_; }
  /// Guards what take() changes.
  [[nodiscard]] std::unique_lock<RecursiveForkMutex> lock() { return std::unique_lock(mutex_); }
  [[nodiscard]] os::Clock::duration since_pumped() const noexcept;

  // The end.
  [[nodiscard]] bool is_retired() const noexcept { return stage_.load() != Stage::used; }
  /// Closed or given up.
  [[nodiscard]] bool has_ended() const noexcept { return stage_.load() >= Stage::closed; }
  [[nodiscard]] bool is_closed() const noexcept { return stage_.load() == Stage::closed; }
  /// Ends all its groups and retires.
  void end_groups() noexcept;
  /// One step, where there is one to do. Gives up where a rank of this host has died.
  void advance() noexcept;
  /// Gives up where it has not ended `waited` after the end of all groups; says who is missing.
  void give_up_after(os::Clock::duration waited) noexcept;
  void give_up(const std::string& why) noexcept;
  /// The same, while the process goes on: after a failure, and if the transport can be dropped.
  void give_up_if_late() noexcept;
  /// How long this rank must leave the transport alone before its end; not at all if all are on one host.
  [[nodiscard]] std::chrono::milliseconds rest() const noexcept;
  /// A group has failed: the end does not wait for long.
  void has_failed() noexcept;

  /// Data of a route is under way: waits on this host let the transport go on more often while one of these lives.
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
  /// What the failed call has promised to take in still comes.
  [[nodiscard]] bool has_just_failed() const noexcept;

 private:
  enum class Stage : std::uint8_t {
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
    Pending message;
  };
  void open_inbox();
  bool has_mail();
  /// A notice or a decision of a group.
  void take_failure(const Control& control);
  /// Runs a call for a message to `rank` that nobody waits for. If the transport cannot reach it any more, the groups
  /// hear that it has died, and nobody else is kept from hearing the message. Returns what the call does; true if it
  /// failed.
  template <class Call>
  bool reach(int rank, const Call& call);
  void take(const Control& control);
  /// The end will not come in order. Others hear it from where it is found first.
  void warn_others(const std::string& why);
  void step();
  /// Drops what nobody has received. Returns whether all that has begun to come has come.
  bool sweep();
  /// Repeats a message that another rank may need, and that this rank need not wait for.
  void reply(int rank, const Control& control) noexcept;
  /// This rank cannot reach `rank` any more.
  void lose(int rank);
  [[nodiscard]] std::string name_of(int rank) const;
  [[nodiscard]] std::string missing() const;

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
  std::atomic<Stage> stage_{Stage::used};
  std::atomic<std::int64_t> pumped_{0};

  // Recursive: taking a message in sends answers.
  RecursiveForkMutex mutex_;
  int next_number_ = 1;
  std::map<int, Listener*> groups_;
  std::map<const void*, std::function<void()>> hooks_;  // by owner
  std::vector<std::pair<int, Control>> outbox_;         // of threads that may not call the transport
  std::vector<Sent> sends_;                             // of control messages
  std::vector<Sent> adopted_;                           // of groups
  std::shared_ptr<Control> inbox_memory_;
  Pending inbox_;
  std::vector<RankInfo> ranks_;
  std::map<int, std::shared_ptr<const sync::PeerLiveness>> neighbours_;  // that live, as far as is known
  Hosts hosts_;                                                          // without the local group
  Deliveries deliveries_;
  std::vector<std::pair<std::shared_ptr<Control>, Pending>> late_;  // that have come while the inbox was full
  std::vector<bool> has_disconnected_;
  int disconnected_ = 0;
  Pending barrier_;
  std::optional<os::Clock::time_point> death_seen_;
  std::vector<int> dead_;      // ranks of this host
  std::size_t passed_on_ = 0;  // of those, to the groups
  os::Clock::time_point looked_{};
};

// All contexts of this process, by the kind of their transport (contexts.cpp).

/// From now on it is ended with its transport at the latest.
void keep(std::shared_ptr<Context> context);
/// Lets contexts without groups get on with their end. Never waits. Called by a thread that may call the transport now.
void advance_endings(std::string_view kind) noexcept;
/// Ends all groups of this process and waits for the other ranks to do so: up to a group's timeout; 2 s if one has
/// failed, or if a rank of this host is dead. Returns whether all have ended in
/// order.
bool end_all(std::string_view kind) noexcept;

}  // namespace muster::hosts

// SPDX-License-Identifier: Apache-2.0
#pragma once
// HostsGroup: ranks on several hosts. On each host they meet in shared memory (a local group); the first rank of each
// host, its leader, speaks for them over a transport.
//
// A round (barrier, all-gather):
//  1. The ranks of a host give their records to each other in a round of the local group.
//  2. The hosts are a tree (HostTree) whose root is rank 0's. Each leader takes the records of all hosts below its
//     own, puts its host's before them, and sends them on.
//  3. The root has all of them, and they go down the same way: each leader takes them and sends them to those below.
//  4. Each leader gives them to the ranks of its host, by messages of the local group.
// With one host it is the local group's round and nothing else.
//
// Parts and duplicates of a group use the same transport. A rank's number there is what messages call it
// (RankInfo::rank): numbers are what the transport and other ranks hear, ranks are places in the group.
//
// A packet between ranks of two hosts is a message of the transport; on one host it goes the local group's way.
//
// Failures: how all ranks come to throw one cause is described at Health. The dead are found by ranks of their host,
// and by whoever has a connection to them; a host that is silent as a whole, by the deadline. A rank that waits for one
// of another host asks it every second whether it moves: ranks answer whenever they are inside the library, waits
// within a host included. If no answer comes it asks other ranks of that host, which see a death. Those messages are
// the context's (context.hpp).

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/hosts/buffer_pool.hpp"
#include "src/hosts/context.hpp"
#include "src/hosts/hosts.hpp"
#include "src/os/clock.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/watchdog.hpp"

namespace muster::sync {
class LocalGroup;
}

namespace muster::hosts {

/// How a group is on this rank: whether it gets on, and what it has failed with. A companion asks this of its group,
/// which may be gone before it, and which owns it where it has streams: so it holds no more of it than this. Any
/// thread.
///
/// Ranks of several hosts find a failure at about the same time, each with its own cause (deadlines pass on all of them
/// at once). All throw the same one:
//
///  1. The first cause on a host is the notice of that host: it stands in the local group's failure cell.
///  2. One rank of the host, its leader if that lives and is in a call, sends the notice up the tree of hosts, and
///     repeats it until it is answered with the decision. If the host above does not confirm the notice, the next one
///     towards the root takes its place, then the hosts before this one. A host that has none of them left decides.
///  3. The host that decides, host 0 as a rule, decides for the first notice that it knows. It first sends the decision
///     to the first host behind it that confirms it. If the deciding host dies now, that one decides next, and has the
///     decision already. If that one has had to decide, because host 0 was stopped for a while, its decision is taken.
///  4. The decision then goes from host to host along the tree (Deliveries::spread); hosts that do not confirm it are
///     bypassed. It stands in the local group's decision cell, where the first stays. When the hosts next to this one
///     have it, all ranks of this host throw it.
/// A companion has no decision: a failure that ends it for good fails its parent as well, and the parent's decision is
/// thrown. Its notices go from host to host along the tree.
class Health {
 public:
  /// `of`: the parent of a companion.
  Health(const std::shared_ptr<SyncGroup>& local, std::shared_ptr<Health> of) : parent(std::move(of)), local_(local) {}
  /// What this rank throws from now on; the first stays.
  void decide(const Error& cause);
  [[nodiscard]] std::optional<Error> decided() const;
  /// A failure that this rank knows of, which need not be the one that all throw. Never waits.
  [[nodiscard]] std::optional<Error> known_failure() const;

  std::atomic<std::uint64_t> progress{0};
  const std::shared_ptr<Health> parent;

 private:
  std::weak_ptr<const SyncGroup> local_;  // of the ranks of this host
  mutable ForkMutex mutex_;
  std::optional<Error> decided_;
};

class HostsGroup final : public sync::Group, private Listener {
 public:
  /// `number`: of the group, in its context; `rank`: this process's in the group.
  HostsGroup(std::shared_ptr<Context> context, int number, Met met, int rank, std::chrono::milliseconds timeout,
             std::shared_ptr<Health> parent = nullptr);
  ~HostsGroup() override;

  /// Of a group that is known to be of this class, by its kind.
  static HostsGroup& of(SyncGroup& group) { return static_cast<HostsGroup&>(group); }

  [[nodiscard]] std::string_view kind() const noexcept override { return transport().kind(); }
  [[nodiscard]] bool shares_memory(int rank) const override;
  [[nodiscard]] int host_of(int rank) const override;
  [[nodiscard]] std::shared_ptr<sync::Region> region_of(int rank) const override;
  [[nodiscard]] std::shared_ptr<const sync::PeerLiveness> liveness(int rank) const override;
  [[nodiscard]] bool has_failure() const noexcept override { return known_failure().has_value(); }
  [[nodiscard]] bool may_move() const noexcept override;
  void progress() noexcept override;

  [[nodiscard]] Transport& transport() const noexcept { return context_->transport(); }
  [[nodiscard]] Context& context() const noexcept { return *context_; }
  /// A rank's in the transport.
  [[nodiscard]] int number_of(int rank) const { return info(rank).rank; }
  /// This tag and the three after it are the routes' own.
  [[nodiscard]] int data_tag() const noexcept;

  /// A failure that this rank knows of, which need not be the one that all throw. Never waits.
  [[nodiscard]] std::optional<Error> known_failure() const { return health_->known_failure(); }

  /// Sends `bytes`, which `keeper` keeps. The group may go before that has finished.
  void post(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
            Finished finished = Finished::sent);
  /// Waits for something that ranks of other hosts do, as wait_until; for routes. The transport goes on while it waits.
  template <class Done>
  void wait_for(const Done& done, std::span<const int> on, const WaitOptions& options);
  /// Runs a call of the transport between this rank and another one. What it fails with is thrown as Error(peer_lost):
  /// that rank cannot be reached any more.
  template <class Call>
  auto towards(int other, const Call& call, const char* phase = "moving tensors") const;
  /// Likewise, of a rank of this host: its death is seen at once. Those of other hosts are the group's waits' to find.
  void throw_if_dead(int other) const;

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_poison(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> do_failure() const override;
  void do_barrier(const WaitOptions& options) override { do_all_gather({}, {}, options); }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override;
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const WaitOptions& options) override;
  [[nodiscard]] std::size_t longest_packet() const noexcept override;
  [[nodiscard]] std::size_t longest_piece(int to) const override;
  [[nodiscard]] bool packets_have_left(int to) override;
  bool do_try_send(int to, const sync::PacketHead& head, std::span<const std::byte> packet) override;
  void do_collect_packets(std::vector<int>& from) override;
  bool do_try_receive(int from, const sync::PacketPlace& place) override;
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override;
  std::shared_ptr<sync::Group> make_part(const Part& part, Tie tie, const WaitOptions& options) override;

 private:
  class Awaiting;
  class Others;
  class OthersPulse;
  /// A call of the group. Throws if the thread may not call the transport.
  [[nodiscard]] auto in_phase(const WaitOptions& options);
  /// What is known of a rank of another host.
  struct View {
    std::uint64_t progress = 0;
    int waits_for = -1;
    bool has_left = false;
    bool is_dead = false;
    bool is_asked = false;  // and has not answered yet
    std::string phase;
    os::Clock::time_point asked{};
    os::Clock::time_point asked_about{};  // other ranks of its host
    os::Clock::time_point heard{};
  };

  void take(const Control& control) override;
  void end() noexcept override;
  enum class Tag : int { up = 0, down = 1, data = 4, mail = 8, long_mail = 9 };
  [[nodiscard]] int tag(Tag kind) const noexcept;
  /// What a round's message of so many ranks must be; else the ranks are in different calls, and the group has failed.
  void check_round(int from, std::span<const std::byte> message, std::size_t ranks, std::size_t record_bytes,
                   const WaitOptions& options);
  /// The rank with that number in the transport; -1 if it is not in this group.
  [[nodiscard]] int rank_of(int number) const noexcept;
  /// A number for a new group of some of these ranks: the same on all of them, and new on each. `words`: one a rank.
  int agree_on_number(const Part& part, std::span<std::int32_t> words, const WaitOptions& options);
  std::vector<std::byte> take_message(int from, int tag, std::uint64_t most, const WaitOptions& options,
                                      std::chrono::milliseconds grace);
  /// A packet of that kind, if it is here.
  bool take_packet(int from, Tag kind, const sync::PacketPlace& place);
  void tell_leaving() noexcept;
  /// Whether a failure of this group needs a decision of all hosts (Health).
  [[nodiscard]] bool needs_decision() const noexcept;
  [[nodiscard]] std::optional<Error> decision() const override;
  /// Makes it this host's decision unless it has one, and returns that.
  Error decide(const Error& cause);
  /// A notice or a decision. It waits until the round of this rank has ended, if it has for the sender.
  void take_failure(const Control& control);
  /// The other hosts have this host's decision, as far as they can.
  [[nodiscard]] bool is_passed_on() const;
  /// The round has ended well for this rank.
  void end_round();
  /// This rank knows of a failure. `host`: where its notice or the decision has come from; -1: from this one.
  void learn(const Error& cause, int host);
  void learn_later_failures();
  /// Sends what is to be sent about the failure next: steps 2 to 4. Never waits.
  void advance_failure();
  /// Step 2, or 3 where this host decides. Afterwards there may be a decision.
  void advance_notice();
  /// Whether this rank sends for its host.
  [[nodiscard]] bool sends_for_host() const;
  [[nodiscard]] Control about_failure(ControlKind kind, const Error& cause) const;
  [[nodiscard]] const std::shared_ptr<const Contacts>& contacts();
  /// Waits for the decision. Returns it.
  Error await_decision() noexcept;
  /// Connections break where a rank has died, and where one has left because of that: a death on this host comes first.
  [[nodiscard]] Error origin_of(const Error& cause) const;
  [[noreturn]] void throw_lost(int other, const char* phase, const Error& error) const;
  void wait(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
            std::span<const int> on, const WaitOptions& options, std::chrono::milliseconds grace,
            bool may_have_left = false);
  [[nodiscard]] std::unique_ptr<const sync::Peers> others() const;
  /// The rank that this one waits for; of its host's round one that has not come; -1 where it waits for none.
  [[nodiscard]] int awaited() const;
  /// Waits may all be short, and somebody elsewhere wait for a dead rank of this host.
  void look_around();
  /// Bytes of messages with that tag that a rank of another host has not taken yet.
  std::shared_ptr<std::atomic<std::uint64_t>> untaken(int to, int tag);
  /// Runs a call of the local group, in which this rank waits for `on` (-1: for all); its failure is this group's.
  template <class Call>
  auto locally(int on, const Call& call);
  /// The same of what `on` waits for: what fails is the group.
  template <class Call>
  auto or_fail(int on, const WaitOptions& options, const Call& call);
  /// With this group's deadline, not the local group's own, and `grace` more.
  [[nodiscard]] WaitOptions later(const WaitOptions& options,
                                  std::chrono::milliseconds grace = std::chrono::milliseconds(0)) const;
  [[nodiscard]] HostTree host_tree() const noexcept { return {static_cast<int>(hosts_.members.size())}; }
  /// Steps 2 and 3 on a leader. Returns the message that its mates get.
  std::shared_ptr<const std::vector<std::byte>> gather_hosts(std::span<const std::byte> here, std::span<std::byte> all,
                                                             const WaitOptions& options);
  [[nodiscard]] sync::Group& local() const noexcept { return sync::inside(*hosts_.local); }
  /// The same, of several ranks; null of one.
  [[nodiscard]] sync::LocalGroup* shared() const noexcept;
  [[nodiscard]] int place_of(int rank) const { return hosts_.place_of[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool has_other_hosts() const noexcept { return hosts_.members.size() > 1; }
  [[nodiscard]] bool is_companion() const noexcept { return health_->parent != nullptr; }
  [[nodiscard]] bool is_alone_here() const noexcept { return hosts_.here().size() == 1; }

  std::shared_ptr<Context> context_;
  int number_;
  Hosts hosts_;
  std::shared_ptr<Health> health_;
  std::atomic<std::uint32_t> round_{0};
  std::atomic<std::uint32_t> ended_round_{0};
  // About a failure; all of it guarded by the context's lock.
  std::vector<Control> later_failures_;  // that this rank learns of when its round has ended
  std::optional<os::Clock::time_point> later_since_;
  std::optional<RunningTime> knows_failure_;  // since when
  bool has_message_ = false;                  // from another host: then this rank sends for its own, too
  int passed_by_ = -1;                        // the host that the decision has come from
  std::shared_ptr<const Contacts> contacts_;
  std::vector<int> above_;                    // hosts that the notice goes to, the next one in front
  int behind_ = -1;                           // the host that the decision goes to first
  bool decides_ = false;                      // this host
  bool is_settled_ = false;                   // then, and there is a host behind that has the decision
  std::shared_ptr<const Delivery> delivery_;  // of the notice, or of the decision to the host behind
  os::Clock::time_point sent_{};              // the notice
  std::shared_ptr<const Spread> spread_;
  std::optional<Error> own_decision_;  // of a host of one rank
  bool is_passed_on_ = false;          // likewise
  // Bytes of packets that have not been taken yet, by their receiver on another host and their tag.
  std::map<std::pair<int, int>, std::shared_ptr<std::atomic<std::uint64_t>>> untaken_;
  /// A packet that comes from another host.
  struct Coming {
    std::shared_ptr<std::byte> memory;
    std::span<const std::byte> bytes;
    Pending pending;
  };
  std::map<std::pair<int, int>, std::deque<Coming>> packets_;  // by sender and tag, in order
  std::shared_ptr<BufferPool> packet_memory_ = std::make_shared<BufferPool>();
  std::atomic<int> waits_for_{-1};
  std::atomic<const char*> phase_{sync::between_calls};
  std::vector<View> views_;  // guarded by the context's lock
  std::unique_ptr<const sync::Peers> others_;
  std::atomic<bool> has_ended_{false};
};

/// Collective. The group of all ranks of a new context, which is kept from now on. `phase`: what this is, for messages.
std::shared_ptr<SyncGroup> make_group(const std::shared_ptr<Context>& context, std::chrono::milliseconds timeout,
                                      const char* phase);

/// While this rank waits for another one (-1: for none, or all of its host): for those who ask.
class HostsGroup::Awaiting {
 public:
  Awaiting(HostsGroup& group, int on, const char* phase)
      : group_(group), on_before_(group.waits_for_.exchange(on)), phase_before_(group.phase_.exchange(phase)) {}
  ~Awaiting() {
    group_.waits_for_.store(on_before_);
    group_.phase_.store(phase_before_);
  }
  Awaiting& operator=(Awaiting&&) = delete;

 private:
  HostsGroup& group_;
  int on_before_;
  const char* phase_before_;
};

template <class Call>
auto HostsGroup::towards(int other, const Call& call, const char* phase) const {
  try {
    return call();
  } catch (const Error& error) {
    throw_lost(other, phase, error);
  }
}

template <class Call>
auto HostsGroup::or_fail(int on, const WaitOptions& options, const Call& call) {
  try {
    return towards(on, call, options.phase);
  } catch (const Error& error) {
    if (!known_failure()) sync::fail(*this, sync::in_own_name(*this, error));
    throw *failure();
  }
}

template <class Call>
auto HostsGroup::locally(int on, const Call& call) {
  const Awaiting awaiting(*this, on, phase_.load());
  try {
    return call();
  } catch (const Error&) {
    // An argument error leaves the local group as it was.
    if (!local().failure()) throw;
    throw *failure();
  }
}

template <class Done>
void HostsGroup::wait_for(const Done& done, std::span<const int> on, const WaitOptions& options) {
  wait(done, {}, on, options, std::chrono::milliseconds(0));
}

}  // namespace muster::hosts

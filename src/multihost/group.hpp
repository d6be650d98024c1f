// SPDX-License-Identifier: Apache-2.0
#pragma once
// HostsGroup: a group of ranks on several hosts. The ranks of each host form a local group, which uses shared memory.
// The first rank of each host, its leader, communicates for them over a transport.
//
// A round (barrier, all-gather, fold):
//  1. The ranks of a host exchange their records in a round of the local group.
//  2. The hosts form a tree (HostTree), whose root is the host of rank 0. Each leader receives the
//     messages of the hosts directly below its own, and makes of them and of the records of its host the message to
//     the host above.
//  3. The answer is sent down the tree in the same way. Each leader makes of it the messages to the leaders below.
//  4. Each leader writes the answer for its host once, in the memory of the local group.
// HostFold makes the messages. Those of an all-gather have all records. With a single host a round is only a round of
// the local group.
//
// Parts and duplicates of a group use the same transport. Error messages name a rank by its number in the transport
// (RankInfo::rank). The transport and other ranks use these numbers too; a "rank" in this code is a position in the
// group.
//
// Packets between ranks of two hosts are messages of the transport. Packets within a host use the local group. After
// forward_packets(), a packet may take several such steps (Forwarding).
//
// Failures: Health describes how all ranks come to throw one cause. A dead rank is detected by the ranks of its host
// and by the ranks that have a connection to it. If a whole host is silent, the deadline detects it. A rank that waits
// for a rank of another host asks it every second whether it makes progress. Ranks answer whenever they are inside the
// library, including waits within a host. If no answer arrives, the rank asks other ranks of that host, which can
// detect a death. The context sends these messages (context.hpp).

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
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/multihost/buffer_pool.hpp"
#include "src/multihost/context.hpp"
#include "src/multihost/forwarding.hpp"
#include "src/multihost/hosts.hpp"
#include "src/multihost/piece_length.hpp"
#include "src/os/clock.hpp"

namespace muster::group {
class LocalGroup;
}

namespace muster::multihost {

/// The state of a group on this rank: its progress, and its failure. A companion group queries the Health of its
/// parent. It holds no other reference to the parent, which may be destroyed first, and which owns the companion if it
/// has streams. Thread-safe.
///
/// Ranks of several hosts detect a failure at about the same time, each with its own cause, because their deadlines
/// expire at the same time. All ranks throw the same cause:
///
///  1. The first cause on a host is the notice of that host. It is stored in the failure cell of the local group.
///  2. One rank of the host sends the notice up the tree of hosts, and repeats it until it is answered with the
///     decision. This rank is the leader, if it is alive and in a call. If the host above does not confirm the notice,
///     the next host towards the root replaces it, and after the root the hosts before this one. If no such host is
///     left, this host decides.
///  3. The deciding host, normally host 0, decides for the first notice that it knows. It first sends the decision to
///     the first host behind it that confirms it. If the deciding host then dies, that host decides next, and has the
///     decision already. If that host has already decided, because host 0 was stopped for a while, its decision is
///     used.
///  4. The decision is then sent from host to host along the tree (Deliveries::spread), which bypasses hosts that do
///     not confirm it. It is stored in the decision cell of the local group, which keeps its first value. When the
///     hosts next to this one have the decision, all ranks of this host throw it.
/// A companion has no decision of its own. A failure that ends it permanently also fails its parent, and the companion
/// throws the parent's decision. Its notices are sent from host to host along the tree.
class FailureConsensus {
 public:
  /// `of` is the Health of the parent of a companion, otherwise null.
  FailureConsensus(const std::shared_ptr<Group>& local, std::shared_ptr<FailureConsensus> of)
      : parent(std::move(of)), local_(local) {}
  /// Sets the cause that this rank throws from now on. Later calls have no effect.
  void decide(const Error& cause);
  [[nodiscard]] std::optional<Error> decided() const;
  /// Returns a failure that this rank knows, which may differ from the cause that all ranks throw. Never waits.
  [[nodiscard]] std::optional<Error> known_failure() const;

  std::atomic<std::uint64_t> progress{0};
  const std::shared_ptr<FailureConsensus> parent;

 private:
  std::weak_ptr<const Group> local_;  // the local group
  mutable ForkMutex mutex_;
  std::optional<Error> decided_;
};

class HostsGroup final : public group::BaseGroup, private ControlListener {
 public:
  /// `number` is the number of the group in its context. `rank` is the rank of this process in the group.
  HostsGroup(std::shared_ptr<Context> context, int number, HostsMembership members, int rank,
             std::chrono::milliseconds timeout, std::shared_ptr<FailureConsensus> parent = nullptr);
  ~HostsGroup() override;

  /// Converts a group whose kind() shows that it has this class.
  static HostsGroup& of(Group& group) { return static_cast<HostsGroup&>(group); }

  [[nodiscard]] std::string_view kind() const noexcept override { return transport().kind(); }
  [[nodiscard]] bool shares_memory(int rank) const override;
  [[nodiscard]] int host_of(int rank) const override;
  [[nodiscard]] std::shared_ptr<group::Region> region_of(int rank) const override;
  [[nodiscard]] std::shared_ptr<const group::PeerLiveness> liveness(int rank) const override;
  [[nodiscard]] bool has_failure() const noexcept override { return known_failure().has_value(); }
  [[nodiscard]] bool has_folds() const noexcept override { return has_other_hosts(); }
  [[nodiscard]] bool may_move() const noexcept override;
  void progress() noexcept override;
  void forward_packets() override;

  [[nodiscard]] Transport& transport() const noexcept { return context_->transport(); }
  [[nodiscard]] Context& context() const noexcept { return *context_; }
  /// Returns the number of a rank in the transport.
  [[nodiscard]] int number_of(int rank) const { return info(rank).global_rank; }
  /// Returns the first of four tags that are reserved for the routes.
  [[nodiscard]] int data_tag() const noexcept;

  /// Returns a failure that this rank knows, which may differ from the cause that all ranks throw. Never waits.
  [[nodiscard]] std::optional<Error> known_failure() const { return health_->known_failure(); }

  /// Sends `bytes`, which `keeper` keeps alive. The group may be destroyed before the send completes.
  void post(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
            SendEnd finished = SendEnd::sent);
  /// When a waiting rank begins to ask ranks of other hosts whether they make progress. A question may need a new
  /// connection to the asked rank, and its answer one from there.
  enum class Asking : std::uint8_t { soon, late };
  /// Waits for actions of ranks of other hosts, like wait_until; for routes. Advances the transport while it waits.
  template <class Done>
  void wait_for(const Done& done, std::span<const int> on, const WaitOptions& options, Asking asking = Asking::soon);
  /// Runs a call of the transport between this rank and `other`. If the call fails, throws Error(peer_lost): the other
  /// rank can no longer be reached.
  template <class Call>
  auto towards(int other, const Call& call, const char* phase = "moving tensors") const;
  /// Throws Error(peer_lost) if `other` is a rank of this host and is dead. Waits of the group detect deaths on other
  /// hosts.
  void throw_if_dead(int other) const;

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_abort(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> do_failure() const override;
  void do_barrier(const WaitOptions& options) override { do_all_gather({}, {}, options); }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override;
  std::vector<std::byte> do_fold(std::span<const std::byte> mine, group::HostFold& fold,
                                 const WaitOptions& options) override;
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const WaitOptions& options) override;
  [[nodiscard]] std::size_t longest_packet() const noexcept override;
  [[nodiscard]] std::size_t longest_piece(int to) const override;
  [[nodiscard]] bool packets_have_left(int to) override;
  bool do_try_send(int to, const group::PacketHead& head, std::span<const std::byte> packet) override;
  bool do_collect_packets(std::vector<int>& from) override;
  bool do_try_receive(int from, const group::PacketPlace& place) override;
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override;
  std::shared_ptr<group::BaseGroup> make_part(const SplitPart& part, Tie tie, const WaitOptions& options) override;
  /// Returns the hosts of a part that contains this rank.
  [[nodiscard]] std::shared_ptr<const Hosts> hosts_of(const SplitPart& part) const;

 private:
  class Awaiting;
  class Others;
  class OthersPulse;
  /// Begins a call of the group. Throws if the thread may not call the transport.
  [[nodiscard]] auto in_phase(const WaitOptions& options);
  /// The information about a rank of another host.
  struct RemoteRankState {
    std::uint64_t progress = 0;
    int waits_for = -1;
    bool has_left = false;
    bool is_dead = false;
    bool is_asked = false;  // and has not answered yet
    std::string phase;
    os::Clock::time_point asked{};
    os::Clock::time_point asked_about{};  // when other ranks of its host were asked about it
    os::Clock::time_point heard{};
  };

  /// Returns the information about a rank. The caller must hold the lock of the context.
  [[nodiscard]] const RemoteRankState& view_of(int rank) const;
  void take(const Control& control) override;
  void end() noexcept override;
  enum class MessageTag : int { up = 0, down = 1, data = 4, mail = 8, long_mail = 9 };
  [[nodiscard]] int tag(MessageTag kind) const noexcept;
  /// Precedes each message of a round.
  struct RoundHead {
    enum class Kind : std::uint32_t { all_gather = 1, fold = 2 };
    std::uint32_t round = 0;
    std::uint32_t record_bytes = 0;
    Kind kind = Kind::all_gather;
    friend bool operator==(const RoundHead&, const RoundHead&) = default;
  };
  /// Returns the maximum length of a message of any round. A message of another call must be reported as such.
  [[nodiscard]] std::uint64_t longest_of_round() const noexcept {
    return sizeof(RoundHead) + max_record * (static_cast<std::uint64_t>(size()) + 1);
  }
  /// Runs steps 1 to 4. Returns the message to the ranks of this host, with its head.
  std::shared_ptr<const std::vector<std::byte>> run_round(std::span<const std::byte> mine, RoundHead::Kind kind,
                                                          group::HostFold& fold, const WaitOptions& options);
  /// Checks that a message belongs to this round. If not, the ranks are in different calls, and the group fails.
  void check_round(int from, std::span<const std::byte> message, const RoundHead& own, const WaitOptions& options);
  /// Returns the rank with that number in the transport, or -1 if it is not in this group.
  [[nodiscard]] int rank_of(int number) const noexcept { return ranks()->rank_of(number); }
  /// Returns a number for the new groups of one call, which no member has used, and the `nonce` of the first rank. Both
  /// are the same on all ranks.
  std::pair<int, Nonce> agree_on_number(bool is_member, const Nonce& nonce, const WaitOptions& options);
  std::vector<std::byte> take_message(int from, int tag, std::uint64_t most, const WaitOptions& options,
                                      std::chrono::milliseconds grace);
  /// The maximum length of a packet that is sent eagerly, whether or not packets are forwarded.
  [[nodiscard]] std::size_t longest_step() const noexcept;
  /// Sends and receives a packet without forwarding, like do_try_send() and do_try_receive(). collect_steps() is
  /// do_collect_packets() without forwarding.
  bool send_step(int to, const group::PacketHead& head, std::span<const std::byte> packet);
  bool receive_step(int from, const group::PacketPlace& place);
  void collect_steps(std::vector<int>& from);
  /// Receives a packet of that kind, if one has arrived.
  bool take_packet(int from, MessageTag kind, const group::PacketPlace& place);
  void tell_leaving() noexcept;
  /// Returns whether a failure of this group needs a decision of all hosts (Health).
  [[nodiscard]] bool needs_decision() const noexcept;
  [[nodiscard]] std::optional<Error> decision() const override;
  /// Makes `cause` the decision of this host unless it already has one. Returns the decision.
  Error decide(const Error& cause);
  /// Handles a notice or a decision. It is deferred to the end of this rank's round, if that round has succeeded for
  /// the sender.
  void take_failure(const Control& control);
  /// Returns whether the other hosts have the decision of this host, as far as they can be reached.
  [[nodiscard]] bool is_passed_on() const;
  /// Called when the round has succeeded for this rank.
  void end_round();
  /// Called when this rank has learnt of a failure. `host` is the host from which its notice or decision was received;
  /// -1 for this host.
  void learn(const Error& cause, int host);
  void learn_later_failures();
  /// Sends the next messages about the failure: steps 2 to 4. Never waits.
  void advance_failure();
  /// Step 2, or step 3 if this host decides. A decision may exist afterwards.
  void advance_notice();
  /// Returns whether this rank sends for its host.
  [[nodiscard]] bool sends_for_host() const;
  [[nodiscard]] Control about_failure(ControlKind kind, const Error& cause) const;
  [[nodiscard]] const std::shared_ptr<const Contacts>& contacts();
  /// Waits for the decision and returns it.
  Error await_decision() noexcept;
  /// Returns the most likely original cause. Connections break if a rank has died, and also if a rank has left because
  /// of that. So a death on this host takes precedence.
  [[nodiscard]] Error origin_of(const Error& cause) const;
  [[noreturn]] void throw_lost(int other, const char* phase, const Error& error) const;
  void wait(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
            std::span<const int> on, const WaitOptions& options, std::chrono::milliseconds grace,
            bool may_have_left = false, Asking asking = Asking::soon);
  [[nodiscard]] std::unique_ptr<const group::Peers> others() const;
  /// Returns the rank for which this one waits, or -1. In a round of its host, this is a rank that has not arrived.
  [[nodiscard]] int awaited() const;
  /// Checks for failures and advances the transport during waits within the host. Such waits may all be short, while
  /// ranks of other hosts wait for a dead rank of this host.
  void look_around();
  /// Returns the counter of the bytes with that tag that a rank of another host has not received yet.
  std::shared_ptr<std::atomic<std::uint64_t>> untaken(int to, int tag);
  /// Runs a call of the local group in which this rank waits for `on` (-1: for all). If the local group fails, this
  /// group fails too.
  template <class Call>
  auto locally(int on, const Call& call);
  /// Runs a call that waits for `on`. If the call fails, the group fails.
  template <class Call>
  auto or_fail(int on, const WaitOptions& options, const Call& call);
  /// Returns options with the deadline of this group instead of that of the local group, extended by `grace`.
  [[nodiscard]] WaitOptions later(const WaitOptions& options,
                                  std::chrono::milliseconds grace = std::chrono::milliseconds(0)) const;
  [[nodiscard]] HostTree host_tree() const noexcept { return {static_cast<int>(hosts_->members.size())}; }
  /// Steps 2 and 3 on a leader. Returns the message for the ranks of this host, with its head.
  std::shared_ptr<const std::vector<std::byte>> fold_hosts(std::span<const std::byte> here, const RoundHead& head,
                                                           group::HostFold& fold, const WaitOptions& options);
  [[nodiscard]] group::BaseGroup& local() const noexcept { return group::inside(*local_); }
  /// Returns the local group if it has several ranks, otherwise null.
  [[nodiscard]] group::LocalGroup* shared() const noexcept;
  [[nodiscard]] int place_of(int rank) const { return hosts_->place_of[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool has_other_hosts() const noexcept { return hosts_->members.size() > 1; }
  [[nodiscard]] bool is_companion() const noexcept { return health_->parent != nullptr; }
  [[nodiscard]] bool is_alone_here() const noexcept { return hosts_->here().size() == 1; }

  std::shared_ptr<Context> context_;
  int number_;
  std::shared_ptr<const Hosts> hosts_;
  std::shared_ptr<Group> local_;
  std::shared_ptr<FailureConsensus> health_;
  std::atomic<std::uint32_t> round_{0};
  std::atomic<std::uint32_t> ended_round_{0};
  // The state of a failure. The lock of the context guards all of it.
  std::vector<Control> later_failures_;  // applied when the round of this rank has ended
  std::optional<os::Clock::time_point> later_since_;
  std::optional<RunningTime> knows_failure_;  // the time since this rank has known a failure
  bool has_message_ = false;  // a message of another host has arrived; so this rank also sends for its own host
  int passed_by_ = -1;        // the host from which the decision was received
  std::shared_ptr<const Contacts> contacts_;
  std::vector<int> above_;                    // hosts that receive the notice, the next one first
  int behind_ = -1;                           // the host that receives the decision first
  bool decides_ = false;                      // this host decides
  bool is_settled_ = false;                   // this host decides, and a host behind it has the decision
  std::shared_ptr<const Delivery> delivery_;  // delivers the notice, or the decision to the host behind
  os::Clock::time_point sent_{};              // when the notice was sent
  std::shared_ptr<const Spread> spread_;
  std::optional<Error> own_decision_;  // used if the host has one rank
  bool is_passed_on_ = false;          // used if the host has one rank
  // The bytes of packets that have not been received yet, by their receiver on another host and their tag.
  std::map<std::pair<int, int>, std::shared_ptr<std::atomic<std::uint64_t>>> untaken_;
  std::unique_ptr<Forwarding> forwarding_;    // null: packets go directly to their receivers
  std::map<int, PieceLength> piece_lengths_;  // by the receiver on another host; only for MPI
  /// A packet of another host that is being received.
  struct Coming {
    std::shared_ptr<std::byte> memory;
    std::span<const std::byte> bytes;
    PendingTransfer pending;
  };
  std::map<std::pair<int, int>, std::deque<Coming>> packets_;  // by sender and tag, in order
  std::shared_ptr<BufferPool> packet_memory_ = std::make_shared<BufferPool>();
  std::atomic<int> waits_for_{-1};
  std::atomic<const char*> phase_{group::between_calls};
  // Has the ranks that this rank has asked, or about which a message has arrived. Guarded by the lock of the context.
  std::map<int, RemoteRankState> views_;
  std::unique_ptr<const group::Peers> others_;
  std::atomic<bool> has_ended_{false};
};

/// Makes the group of all ranks of a new context, and keeps the context from now on. Collective. `phase` is the name of
/// the operation in error messages. `open_files_left` is os::open_files_left() before the rendezvous.
std::shared_ptr<Group> make_group(const std::shared_ptr<Context>& context, std::chrono::milliseconds timeout,
                                  const char* phase, std::uint64_t open_files_left);

/// Publishes the rank for which this rank waits, and the phase, to ranks that ask. -1 means no single rank, or all
/// ranks of its host.
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
    if (!known_failure()) group::fail(*this, group::in_own_name(*this, error));
    throw *this->error();
  }
}

template <class Call>
auto HostsGroup::locally(int on, const Call& call) {
  const Awaiting awaiting(*this, on, phase_.load());
  try {
    return call();
  } catch (const Error&) {
    // An argument error leaves the local group usable.
    if (!local().error()) throw;
    throw *this->error();
  }
}

template <class Done>
void HostsGroup::wait_for(const Done& done, std::span<const int> on, const WaitOptions& options, Asking asking) {
  wait(done, {}, on, options, std::chrono::milliseconds(0), false, asking);
}

}  // namespace muster::multihost

// SPDX-License-Identifier: Apache-2.0
#pragma once
// LocalGroup: processes of one host that meet in a control block.
//
// A round (barrier, all-gather):
//  1. Write the own record of this round into its cell (odd and even rounds have their own: nobody is two rounds
//     ahead).
//  2. Mark the own cell as arrived and count oneself in. The last one clears the count, publishes the round's number,
//     and wakes the sleepers.
//  3. The others look for a moment, then sleep on the round's number in slices; between slices they look for the
//     dead, the cancelled and the deadline (watchdog.hpp).
//  4. Copy out all records.
// A packet: the sender appends length, head and bytes to the ring of this pair of ranks, if there is room for all of
// it; the receiver copies them out in order.

#include <map>
#include <memory>

#include "src/os/futex.hpp"
#include "src/sync/control_block.hpp"
#include "src/sync/watchdog.hpp"

namespace muster::sync {

/// What a rendezvous gives each rank.
struct Membership {
  int rank = 0;
  std::shared_ptr<Peers> peers;
  std::shared_ptr<ControlBlock> control;
  std::shared_ptr<ControlBlock> parent;  // of a companion: where its ranks' progress is told, and what it fails with
  SyncGroup::Nonce nonce{};
};

class LocalGroup final : public Group {
 public:
  LocalGroup(Membership membership, std::chrono::milliseconds timeout);
  ~LocalGroup() override;

  [[nodiscard]] std::string_view kind() const noexcept override { return "local"; }
  [[nodiscard]] bool shares_memory(int rank) const override {
    (void)info(rank);
    return true;
  }
  [[nodiscard]] int host_of(int rank) const override {
    (void)info(rank);
    return 0;
  }
  [[nodiscard]] std::shared_ptr<Region> region_of(int rank) const override {
    (void)info(rank);
    return peers_->regions[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] bool has_failure() const noexcept override;
  void progress() noexcept override;
  /// For a group of several hosts that this one is a part of: the cause that all ranks throw, which need not be this
  /// group's own failure. The first one stays.
  void decide(const Error& cause) noexcept { control_->decide(cause); }
  [[nodiscard]] std::optional<Error> decision() const { return control_->decision(); }
  /// The other hosts have received the decision, as far as they can.
  void set_passed_on() noexcept { control_->header().is_passed_on.store(1, std::memory_order_release); }
  [[nodiscard]] bool is_passed_on() const noexcept {
    return control_->header().is_passed_on.load(std::memory_order_acquire) != 0;
  }
  /// The rank has left the group or is dead.
  [[nodiscard]] bool is_gone(int rank) const noexcept { return control_->has_left(rank) || peers_->has_ended(rank); }
  /// For the same: the first rank that has not come to the round that this one is in; none if it is in none. Any
  /// thread.
  [[nodiscard]] std::optional<int> missing() const;

  /// Called by every wait of this rank before it sleeps, and returns for how long at most: for a group that this one is
  /// a part of, whose other messages have to be looked after meanwhile. By any thread that waits. Set before the group
  /// is used.
  void while_waiting(std::function<std::chrono::nanoseconds()> call) { while_waiting_ = std::move(call); }

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_poison(const Error& cause) noexcept override { control_->poison(cause); }
  [[nodiscard]] std::optional<Error> do_failure() const override;
  void do_barrier(const WaitOptions& options) override { round({}, options); }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override;
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const WaitOptions& options) override;
  bool do_try_send(int to, const PacketHead& head, std::span<const std::byte> packet) override;
  bool do_try_receive(int from, const PacketPlace& place) override;
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override;
  std::shared_ptr<Group> make_part(const Part& part, Tie tie, const WaitOptions& options) override;

 private:
  [[nodiscard]] auto in_phase(const WaitOptions& options);
  std::uint32_t round(std::span<const std::byte> record, const WaitOptions& options);
  /// The loop of all waits. sleep(longest).
  template <class Done, class Needed, class Awaited, class Sleep>
  void wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited,
            const Sleep& sleep);
  /// Waits (os::comes_soon), then sleeps on a word that changes with what `done` looks at.
  template <class Done, class Needed, class Awaited>
  void wait_on(const std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& waiting, const WaitOptions& options,
               const Done& done, const Needed& needed, const Awaited& awaited);
  Ring& outgoing(int to);
  /// Null if that rank has sent nothing yet.
  Ring* incoming(int from);
  /// Waits for what those ranks do, and ring this one's bell for.
  template <class Done>
  void await(std::span<const int> on, const WaitOptions& options, const Done& done);

  std::shared_ptr<Peers> peers_;  // not changed once the group is made
  std::shared_ptr<ControlBlock> control_;
  std::shared_ptr<ControlBlock> parent_;
  std::uint32_t round_ = 0;
  int turns_ = os::turns_on_core(size());
  // Rings that have been used, by the other rank.
  std::map<int, Ring> outgoing_;
  std::map<int, Ring> incoming_;
  std::function<std::chrono::nanoseconds()> while_waiting_;
};

}  // namespace muster::sync

// SPDX-License-Identifier: Apache-2.0
#pragma once
// LocalGroup: processes of one host that share a control block.
//
// A round (barrier, all-gather):
//  1. The rank writes its record of this round. Even and odd rounds have separate records: no rank is two rounds ahead
//     of another.
//  2. The rank marks its cell as arrived and increments the count. The last rank clears the count, publishes the
//     round's number, and wakes the sleeping ranks.
//  3. The other ranks spin for a moment, and then sleep on the round's number in slices. Between slices they check for
//     dead ranks, cancellation and the deadline (watchdog.hpp).
//  4. The rank copies out all records.
// An answer is data that one rank, always the same, writes once for all other ranks (give_answer). It consists of
// pieces in two buffers. The writer waits until all ranks have read a piece before it reuses its buffer. It need not
// wait at the begin of an answer, because a round precedes each answer, and no rank begins that round before it has
// read the previous answer. To send a packet, the sender appends length, head and bytes to the ring of this pair of
// ranks if there is room for all of it. The receiver copies packets out in order.

#include <map>
#include <memory>

#include "src/group/control_block.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/futex.hpp"

namespace muster::group {

/// The result of a rendezvous on each rank.
struct Membership {
  int rank = 0;
  std::shared_ptr<Peers> peers;
  std::shared_ptr<ControlBlock> control;
  std::shared_ptr<ControlBlock> parent;  // for a companion; receives progress; its failure fails the companion
  Group::Nonce nonce{};
};

class LocalGroup final : public BaseGroup {
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
  /// For a group of several hosts that includes this group: sets the error that all ranks throw, which need not be this
  /// group's own failure. The first one stays.
  void decide(const Error& cause) noexcept { control_->decide(cause); }
  [[nodiscard]] std::optional<Error> decision() const { return control_->decision(); }
  /// Records that the decision was sent to the other hosts, as far as they can be reached.
  void set_passed_on() noexcept { control_->header().is_passed_on.store(1, std::memory_order_release); }
  [[nodiscard]] bool is_passed_on() const noexcept {
    return control_->header().is_passed_on.load(std::memory_order_acquire) != 0;
  }
  /// Returns whether the rank has left the group or is dead.
  [[nodiscard]] bool is_gone(int rank) const noexcept { return control_->has_left(rank) || peers_->has_ended(rank); }
  /// For a group of several hosts that includes this group: returns the first rank that has not entered the current
  /// round of this rank, or nullopt if all have. Any thread.
  [[nodiscard]] std::optional<int> missing() const;

  /// For a group of several hosts that includes this group: gives `answer` to all other ranks, which call
  /// take_answer(). A round must precede each answer. Throws as barrier().
  void give_answer(std::span<const std::byte> answer, const WaitOptions& options);
  /// Returns the answer of the rank `from`. Fails the group if it is longer than `most` bytes. Throws as barrier().
  std::vector<std::byte> take_answer(int from, std::uint64_t most, const WaitOptions& options);

  /// Sets a function that every wait of this rank calls before it sleeps. It returns the maximum time of the sleep. A
  /// group that includes this one uses it to process its other messages meanwhile. Any waiting thread may call it. Must
  /// be set before the group is used.
  void while_waiting(std::function<std::chrono::nanoseconds()> call) { while_waiting_ = std::move(call); }

 protected:
  [[nodiscard]] std::uint64_t rounds() const noexcept override { return round_; }
  void do_abort(const Error& cause) noexcept override { control_->abort(cause); }
  [[nodiscard]] std::optional<Error> do_failure() const override;
  void do_barrier(const WaitOptions& options) override { round({}, options); }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) override;
  void do_wait_until(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                     std::span<const int> on, const WaitOptions& options) override;
  bool do_try_send(int to, const PacketHead& head, std::span<const std::byte> packet) override;
  bool do_try_receive(int from, const PacketPlace& place) override;
  void do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                           const WaitOptions& options) override;
  std::shared_ptr<BaseGroup> make_part(const SplitPart& part, Tie tie, const WaitOptions& options) override;

 private:
  [[nodiscard]] auto in_phase(const WaitOptions& options);
  std::uint32_t round(std::span<const std::byte> record, const WaitOptions& options);
  /// The loop of all waits. Calls sleep(maximum time).
  template <class Done, class Needed, class Awaited, class Sleep>
  void wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited,
            const Sleep& sleep);
  /// Spins briefly (os::spin_then_yield), then sleeps on a futex word that changes when the result of `done` may
  /// change.
  template <class Done, class Needed, class Awaited>
  void wait_on(const std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& waiting, const WaitOptions& options,
               const Done& done, const Needed& needed, const Awaited& awaited);
  Ring& outgoing(int to);
  /// Returns null if that rank has not sent anything yet.
  Ring* incoming(int from);
  /// Waits for actions of those ranks that ring this rank's bell.
  template <class Done>
  void await(std::span<const int> on, const WaitOptions& options, const Done& done);

  std::shared_ptr<Peers> peers_;  // constant after construction
  std::shared_ptr<ControlBlock> control_;
  std::shared_ptr<ControlBlock> parent_;
  std::uint32_t round_ = 0;
  std::uint32_t pieces_ = 0;  // the number of pieces of answers that this rank has written or read
  int turns_ = os::spin_iterations(size());
  // Rings that have been used, by the other rank.
  std::map<int, Ring> outgoing_;
  std::map<int, Ring> incoming_;
  std::function<std::chrono::nanoseconds()> while_waiting_;
};

}  // namespace muster::group

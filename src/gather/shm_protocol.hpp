// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shared memory route: what its two sides, shm_sending.cpp and shm_receiving.cpp, have in common.
//
//  1. offer: the sender encodes its tree; tensors of an arena stay where they are (a lease is taken on the arena), all
//     others get a place in a slot. Nothing is allocated.
//     What is small goes at once: bytes and, behind them, the message are written, and the record says that it is
//     complete. The first rank then has all of it when round 1 is over (of a part of a stream: with its header); 2 is
//     not needed, nor is round 2 if the first rank has read the slot before, so that it has it mapped. Nobody looks at
//     the slot if round 1 ends otherwise for the first rank. A slot whose memory has yet to be reserved waits for
//     round 1, as the parts of a stream do, whose memory is agreed on.
//  2. move, sender: makes a slot where it needs one. The message (arenas, slot, descriptor) goes to the first rank, or
//     says that there is none; then the bytes into the slot.
//  3. move, first rank: takes every message, even when one of them is bad (else a sender could wait for room), maps
//     what is new to it, decodes, and, while the senders copy, puts known pages into its page table.
//     It takes the leases on the slot and on arenas that are in the message.
//  4. A sender that fails withdraws its leases. Those that the first rank has taken stay: it may have all that it
//     needs.
// Messages carry the number of the exchange: what a failed one left behind is passed over.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/core/descriptor.hpp"
#include "src/gather/route.hpp"
#include "src/shm/arena_core.hpp"
#include "src/shm/slot.hpp"

namespace muster::gather {

/// The most that is written before round 1: of tensors, and of the message.
inline constexpr std::uint64_t most_eager = 1 << 20;
inline constexpr std::uint64_t most_eager_message = 64 << 10;
/// MUSTER_EAGER=0: never. It need not be the same on all ranks.
bool is_eager();
/// Where the message stands in a slot with so many bytes.
constexpr std::uint64_t message_place(std::uint64_t moving_bytes) noexcept {
  return (moving_bytes + 63) / 64 * 64;
}

/// What the route keeps with a group.
struct ShmState {
  ForkMutex cleaning;
  shm::SenderPool pool;
  shm::RemoteSegments remotes;
  std::map<std::pair<int, std::uint64_t>, std::weak_ptr<detail::ArenaCore>> arenas_sent;  // by first rank and place
};
std::shared_ptr<ShmState> shm_state_of(SyncGroup& group);

struct MessageHeader {
  std::uint64_t exchange = 0;
  std::uint64_t slot = 0;   // its place; 0: none
  shm::LeaseId lease = {};  // on it
  std::uint32_t arenas = 0;
  std::uint16_t checks_leases = 0;
  std::uint16_t is_well = 0;  // else nothing follows, and the next round says why
};

struct ArenaEntry {
  std::uint64_t segment = 0;
  shm::LeaseId lease;
  std::uint64_t hash = 0;  // of this exchange's tensors in it, where leases are checked
};

/// Tells another rank of a segment of this one; 0: there is none, and the next round says why.
void tell(const Call& call, int to, std::uint64_t segment, const char* phase);
/// What a rank tells next in this exchange.
std::uint64_t hear(const Call& call, int from, const char* phase);

/// Over shared memory (merge_shm.cpp).
std::unique_ptr<Transfer> make_shm_merge(const Call& call);

/// A sender's side. Made before round 1; what it lent is withdrawn when it goes without commit().
class ShmSending final : public Transfer {
 public:
  explicit ShmSending(const Call& call) : call_(call), state_(shm_state_of(*call.group)) {}
  ~ShmSending() override;
  ShmSending& operator=(ShmSending&&) = delete;
  void offer(Record& record) override;
  void move(std::span<const Record> records, ExchangeReport& report) override;
  void commit() noexcept override;
  std::vector<std::unique_ptr<Obligation>> obligations() override;
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  struct Lent {
    std::shared_ptr<detail::ArenaCore> arena;
    shm::LeaseId lease;
    std::vector<std::span<const std::byte>> watched;
    bool is_new = false;  // to the first rank
  };
  std::optional<core::Place> place(const Tensor& tensor);
  std::uint32_t lend(const std::shared_ptr<detail::ArenaCore>& arena);
  [[nodiscard]] std::vector<std::byte> message(std::span<const std::byte> body) const;
  void lend_slot();
  void send(std::span<const std::byte> message) const;
  void write();

  const Call& call_;
  std::shared_ptr<ShmState> state_;
  std::vector<std::byte> message_;
  core::SlotLayout layout_;
  std::vector<std::pair<std::uint64_t, const Tensor*>> moving_;  // into the caller's tree, which stays during the call
  std::uint64_t moving_payload_ = 0;
  std::uint64_t arena_payload_ = 0;
  std::vector<Lent> lent_;
  shm::SlotPlan plan_;
  std::shared_ptr<shm::Slot> slot_;
  shm::LeaseId slot_lease_;
  bool is_small_ = false;  // with its message, which then stands behind the bytes
  bool is_written_ = false;
  bool committed_ = false;
};

/// The first rank's side.
class ShmReceiving final : public Transfer {
 public:
  explicit ShmReceiving(const Call& call) : call_(call), state_(shm_state_of(*call.group)), entries_(call.list.size()) {
    state_->remotes.forget_retired();
  }
  void offer(Record&) override {}
  void move(std::span<const Record> records, ExchangeReport& report) override;
  void commit() noexcept override {
    for (const auto& [segment, bytes] : in_use_) segment->note_written(bytes);
  }
  std::vector<std::optional<Config>> deliver() override { return std::move(entries_); }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  [[nodiscard]] std::vector<std::byte> take(int sender, const Record& record);
  [[nodiscard]] std::vector<std::byte> written_message(int sender, const Record& record);
  std::shared_ptr<shm::RemoteSegment> segment(int sender, std::uint64_t place,
                                              os::Access access = os::Access::read_only);
  void unpack(std::size_t position, const Record& record, std::span<const std::byte> message, ExchangeReport& report);

  const Call& call_;
  std::shared_ptr<ShmState> state_;
  std::vector<std::optional<Config>> entries_;
  std::vector<std::pair<std::shared_ptr<shm::RemoteSegment>, std::uint64_t>> in_use_;
};

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shared memory route: the declarations that its two sides share.
//
//  1. Offer: the sender encodes its tree. Tensors in an arena are not copied (a lease is taken on the arena); all other
//     tensors get a place in a slot. Nothing is allocated.
//     Eager path: for small payloads the sender writes the bytes and then the message before round 1, and sets
//     `complete` in its record. The root then has all of it after round 1 (for a part of a stream: with its header).
//     Step 2 is skipped. Round 2 is also skipped if the root has read the slot before, and so has mapped it. If round 1
//     fails on the root, no rank reads the slot. The eager path is not used for a slot whose memory must still be
//     reserved, nor for a part of a stream that needs more memory. The ranks first agree on that memory.
//  2. Move, sender: creates a slot if it needs one. It sends the message (arenas, slot, descriptor) to the root, or a
//     message that it has failed. Then it writes the bytes into the slot.
//  3. Move, root: receives every message, even if one of them is invalid (otherwise a sender could wait for buffer
//     space). It maps new segments, decodes, and maps known pages while the senders copy. It takes the leases on the
//     slot and on the arenas in the message.
//  4. A sender that fails withdraws its leases. Leases that the root has taken remain, because the root may have all
//     the data that it needs.
// Messages carry the number of the exchange, so that messages of a failed exchange are skipped.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "muster/group.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/core/descriptor.hpp"
#include "src/gather/route.hpp"
#include "src/shm/arena_core.hpp"
#include "src/shm/slot.hpp"

namespace muster::gather {

/// The maximum sizes that are written before round 1: of tensors, and of the message.
inline constexpr std::uint64_t most_eager = 1 << 20;
inline constexpr std::uint64_t most_eager_message = 64 << 10;
/// Returns false if MUSTER_EAGER=0. It may differ between ranks.
bool is_eager();
/// Returns the offset of the message in a slot with that many bytes of tensors.
constexpr std::uint64_t message_place(std::uint64_t moving_bytes) noexcept {
  return (moving_bytes + 63) / 64 * 64;
}

/// The state that the route keeps with a group.
struct ShmState {
  ForkMutex cleaning;
  shm::SenderPool pool;
  shm::RemoteSegments remotes;
  std::map<std::pair<int, std::uint64_t>, std::weak_ptr<detail::ArenaCore>> arenas_sent;  // by root and place
};
std::shared_ptr<ShmState> shm_state_of(Group& group);

struct MessageHeader {
  std::uint64_t exchange = 0;
  std::uint64_t slot = 0;   // place of the slot; 0: no slot
  shm::LeaseId lease = {};  // on the slot
  std::uint32_t arenas = 0;
  std::uint16_t checks_leases = 0;
  std::uint16_t is_well = 0;  // 0: nothing follows, and the next round reports the reason
};

struct ArenaEntry {
  std::uint64_t segment = 0;
  shm::LeaseId lease;
  std::uint64_t hash = 0;  // hash of this exchange's tensors in the arena, if leases are checked
};

/// Sends the place of a segment of this rank to another rank. 0: failure, and the next round reports the reason.
void tell(const GatherCall& call, int to, std::uint64_t segment, const char* phase);
/// Returns the next place that a rank sends in this exchange.
std::uint64_t hear(const GatherCall& call, int from, const char* phase);

/// Returns the merge over shared memory (merge_shm.cpp).
std::unique_ptr<Transfer> make_shm_merge(const GatherCall& call);

/// A sender's side, created before round 1. If it is destroyed without commit(), its leases are withdrawn.
class ShmSending final : public Transfer {
 public:
  explicit ShmSending(const GatherCall& call) : call_(call), state_(shm_state_of(*call.group)) {}
  ~ShmSending() override;
  ShmSending& operator=(ShmSending&&) = delete;
  void offer(ExchangeRecord& record) override;
  void move(const Records& records, ExchangeReport& report) override;
  void commit() noexcept override;
  std::vector<std::unique_ptr<OutstandingLease>> obligations() override;
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  struct LentArena {
    std::shared_ptr<detail::ArenaCore> arena;
    shm::LeaseId lease;
    std::vector<std::span<const std::byte>> watched;
    bool is_new = false;  // the root has not mapped it yet
  };
  std::optional<core::TensorLocation> place(const Tensor& tensor);
  std::uint32_t lend(const std::shared_ptr<detail::ArenaCore>& arena);
  [[nodiscard]] std::vector<std::byte> message(std::span<const std::byte> body) const;
  void lend_slot();
  void send(std::span<const std::byte> message) const;
  void write();

  const GatherCall& call_;
  std::shared_ptr<ShmState> state_;
  std::vector<std::byte> message_;
  core::SlotLayout layout_;
  // Pointers into the caller's tree, which outlives the call.
  std::vector<std::pair<std::uint64_t, const Tensor*>> moving_;
  std::uint64_t moving_payload_ = 0;
  std::uint64_t arena_payload_ = 0;
  std::vector<LentArena> lent_;
  shm::SlotPlan plan_;
  std::shared_ptr<shm::Slot> slot_;
  shm::LeaseId slot_lease_;
  bool is_small_ = false;  // the payload is small, and its message is written behind the bytes
  bool is_written_ = false;
  bool committed_ = false;
};

/// The root's side.
class ShmReceiving final : public Transfer {
 public:
  explicit ShmReceiving(const GatherCall& call)
      : call_(call), state_(shm_state_of(*call.group)), entries_(call.list.size()) {
    state_->remotes.forget_retired();
  }
  void offer(ExchangeRecord&) override {}
  void move(const Records& records, ExchangeReport& report) override;
  void commit() noexcept override {
    for (const auto& [segment, bytes] : in_use_) segment->note_written(bytes);
  }
  std::vector<std::optional<Config>> deliver() override { return std::move(entries_); }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  [[nodiscard]] std::vector<std::byte> take(int sender, const ExchangeRecord& record);
  [[nodiscard]] std::vector<std::byte> written_message(int sender, const ExchangeRecord& record);
  std::shared_ptr<shm::RemoteSegment> segment(int sender, std::uint64_t place,
                                              os::Access access = os::Access::read_only);
  void unpack(std::size_t position, const ExchangeRecord& record, std::span<const std::byte> message,
              ExchangeReport& report);

  const GatherCall& call_;
  std::shared_ptr<ShmState> state_;
  std::vector<std::optional<Config>> entries_;
  std::vector<std::pair<std::shared_ptr<shm::RemoteSegment>, std::uint64_t>> in_use_;
};

}  // namespace muster::gather

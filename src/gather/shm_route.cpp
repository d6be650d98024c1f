// SPDX-License-Identifier: Apache-2.0
// The shared memory route.
//
//  1. offer: the sender encodes its tree; tensors of an arena stay where they are (a lease is taken on the arena), all
//  others get a place in a slot. Nothing is allocated.
//  2. move, sender: the message (arenas, descriptor) goes to the first rank; then the descriptors of segments that are
//  new to it; then the bytes into the slot.
//  3. move, first rank: takes every message and every descriptor, even when one of them is bad (else a sender could
//  wait for room), maps what is new, decodes, and, while
//     the senders copy, puts known pages into its page table.
//  4. commit: the sender publishes the use of the slot, the first rank's leases begin to count.
// Messages and notes carry the number of the exchange: what a failed one left behind is passed over.

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "src/core/descriptor.hpp"
#include "src/gather/route.hpp"
#include "src/os/futex.hpp"
#include "src/shm/arena_core.hpp"
#include "src/shm/slot.hpp"
#include "src/sync/descriptor_channel.hpp"

namespace muster::gather {
namespace {

using core::Place;
using detail::ArenaCore;
using Clock = std::chrono::steady_clock;

/// What the route keeps with a group.
struct ShmState {
  shm::SenderPool pool;
  std::map<std::pair<int, std::uint64_t>, std::shared_ptr<shm::RemoteSegment>> remotes;  // by sender and segment
  std::set<std::pair<int, std::uint64_t>> arenas_sent;                                   // by first rank and segment
};

std::shared_ptr<ShmState> state_of(SyncGroup& group) {
  static const char key = 0;
  return std::static_pointer_cast<ShmState>(group.extension(&key, [] { return std::make_shared<ShmState>(); }));
}

struct MessageHeader {
  std::uint64_t exchange = 0;
  std::uint32_t arenas = 0;
  std::uint32_t checks_leases = 0;
};

struct ArenaEntry {
  std::uint64_t segment = 0;
  ArenaCore::Lease lease;
  std::uint32_t is_new = 0;
  std::uint32_t reserved = 0;
  std::uint64_t hash = 0;  // of this exchange's tensors in it, where leases are checked
};

struct Note {
  std::uint64_t exchange = 0;
  std::uint64_t segment = 0;
};

template <class T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto part = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), part.begin(), part.end());
}

class SlotObligation final : public Obligation {
 public:
  SlotObligation(std::shared_ptr<shm::Slot> slot, std::uint32_t use, std::shared_ptr<const PeerLiveness> holder)
      : slot_(std::move(slot)), use_(use), holder_(std::move(holder)) {}
  bool wait(Clock::time_point deadline) const override {
    const std::atomic<std::uint32_t>& released = slot_->segment().header().released;
    for (;;) {
      const std::uint32_t seen = released.load(std::memory_order_acquire);
      if (static_cast<std::int32_t>(seen - use_) >= 0 || holder_->is_dead()) return true;
      const auto left = deadline - Clock::now();
      if (left <= Clock::duration::zero()) return false;
      os::futex_wait(released, seen, std::min<Clock::duration>(left, std::chrono::milliseconds(20)));
    }
  }

 private:
  std::shared_ptr<shm::Slot> slot_;
  std::uint32_t use_;
  std::shared_ptr<const PeerLiveness> holder_;
};

class ArenaObligation final : public Obligation {
 public:
  ArenaObligation(std::shared_ptr<ArenaCore> arena, ArenaCore::Lease lease, std::shared_ptr<const PeerLiveness> holder)
      : arena_(std::move(arena)), lease_(lease), holder_(std::move(holder)) {}
  bool wait(Clock::time_point deadline) const override {
    while (!arena_->has_ended(lease_) && !holder_->is_dead()) {
      const auto left = deadline - Clock::now();
      if (left <= Clock::duration::zero()) return false;
      os::futex_wait(arena_->segment().header().leases[lease_.word], lease_.stamp,
                     std::min<Clock::duration>(left, std::chrono::milliseconds(20)));
    }
    return true;
  }

 private:
  std::shared_ptr<ArenaCore> arena_;
  ArenaCore::Lease lease_;
  std::shared_ptr<const PeerLiveness> holder_;
};

/// A sender's side of one exchange.
class Sending {
 public:
  Sending(const Call& call, ShmState& state) : call_(call), state_(state) {}
  ~Sending() {
    if (committed_) return;
    for (const Lent& lent : lent_) lent.arena->take_back(lent.lease);
    if (slot_) state_.pool.discard(call_.first(), slot_);
  }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

  void offer(Record& record) {
    body_ = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) { return place(tensor); });
    record.descriptor_bytes = body_.size();
    record.descriptor_hash = XXH3_64bits(body_.data(), body_.size());
    record.moving_bytes = layout_.size();
    record.payload_bytes = moving_payload_ + arena_payload_;
    if (layout_.size() == 0) return;
    const GatherOptions& options = *call_.options;
    plan_ = state_.pool.plan(call_.first(), layout_.size(),
                             {options.pipeline_depth, options.memory_budget, options.pool_limit}, backing_);
    record.held = plan_.held;
    record.fresh_bytes = plan_.fresh_bytes;
    if (plan_.fresh_bytes != 0) {
      const os::MemoryHeadroom room = os::memory_headroom(backing_);
      record.available_bytes = room.bytes;
      record.limit = room.limit;
    }
    record.new_segment = plan_.slot == nullptr;
    if (plan_.slot) {
      record.segment_id = plan_.slot->segment().id();
      record.use = plan_.slot->next_use();
    } else {
      record.use = 1;
    }
  }

  void move(ExchangeReport& report) {
    const WaitOptions wait = call_.wait("gather: copying");
    SyncGroup& group = *call_.group;
    std::vector<const ArenaCore*> unknown;
    std::vector<std::byte> message;
    append(message, header());
    for (const Lent& lent : lent_) {
      const bool is_new = !state_.arenas_sent.contains({call_.first(), lent.arena->segment().id()});
      append(message,
             ArenaEntry{lent.arena->segment().id(), lent.lease, is_new ? 1U : 0U, 0, shm::hash_parts(lent.watched)});
      if (is_new) unknown.push_back(lent.arena.get());
    }
    message.insert(message.end(), body_.begin(), body_.end());
    group.send(call_.first(), message, wait);
    for (const ArenaCore* arena : unknown) send_segment(arena->segment(), wait);
    report.arena_bytes = arena_payload_;
    if (layout_.size() == 0) return;
    try {
      const bool is_new = plan_.slot == nullptr;
      slot_ = state_.pool.carry_out(call_.first(), std::move(plan_), backing_);
      if (is_new) send_segment(slot_->segment(), wait);
    } catch (const Error&) {
      // The first rank waits for a segment: it must hear that there is none.
      if (!slot_) {
        const Note note{call_.number, 0};
        group.descriptor_channel()->send(call_.first(), std::as_bytes(std::span(&note, 1)), -1, wait);
      }
      throw;
    }
    shm::SlotWriter writer(*slot_, [&] { group.progress(); });
    for (const auto& [offset, tensor] : moving_) writer.write(offset, tensor->view());
    writer.finish();
  }

  void commit() noexcept {
    committed_ = true;
    if (slot_) slot_->publish();
    for (const Lent& lent : lent_) state_.arenas_sent.insert({call_.first(), lent.arena->segment().id()});
  }

  std::vector<std::unique_ptr<Obligation>> obligations() {
    std::vector<std::unique_ptr<Obligation>> all;
    const auto holder = call_.group->liveness(call_.first());
    if (slot_) all.push_back(std::make_unique<SlotObligation>(slot_, slot_->published(), holder));
    for (const Lent& lent : lent_) all.push_back(std::make_unique<ArenaObligation>(lent.arena, lent.lease, holder));
    return all;
  }

 private:
  struct Lent {
    std::shared_ptr<ArenaCore> arena;
    ArenaCore::Lease lease;
    std::vector<std::span<const std::byte>> watched;
  };

  std::optional<Place> place(const Tensor& tensor) {
    const std::uint64_t bytes = tensor.nbytes();
    if (tensor.view().is_contiguous() && bytes != 0) {
      if (const auto found = ArenaCore::find(tensor.data(), bytes)) {
        arena_payload_ += bytes;
        const std::uint32_t number = lend(found->arena);
        if (call_.options->check_leases) lent_[number - 1].watched.push_back(tensor.bytes());
        return Place{number, found->offset};
      }
    }
    moving_payload_ += bytes;
    moving_.emplace_back(layout_.place(bytes), &tensor);
    return std::nullopt;
  }

  std::uint32_t lend(const std::shared_ptr<ArenaCore>& arena) {
    for (std::size_t i = 0; i < lent_.size(); ++i)
      if (lent_[i].arena == arena) return static_cast<std::uint32_t>(i + 1);
    lent_.push_back({arena, arena->lend(call_.group->liveness(call_.first())), {}});
    return static_cast<std::uint32_t>(lent_.size());
  }

  [[nodiscard]] MessageHeader header() const {
    return {call_.number, static_cast<std::uint32_t>(lent_.size()), call_.options->check_leases ? 1U : 0U};
  }

  void send_segment(const shm::OwnedSegment& segment, const WaitOptions& wait) {
    const Note note{call_.number, segment.id()};
    call_.group->descriptor_channel()->send(call_.first(), std::as_bytes(std::span(&note, 1)), segment.memory().get(),
                                            wait);
  }

  const Call& call_;
  ShmState& state_;
  os::Backing backing_ = os::default_backing();
  std::vector<std::byte> body_;
  core::SlotLayout layout_;
  std::vector<std::pair<std::uint64_t, const Tensor*>> moving_;  // into the caller's tree, which stays during the call
  std::uint64_t moving_payload_ = 0;
  std::uint64_t arena_payload_ = 0;
  std::vector<Lent> lent_;
  shm::SlotPlan plan_;
  std::shared_ptr<shm::Slot> slot_;
  bool committed_ = false;
};

/// The first rank's side of one exchange.
class Receiving {
 public:
  Receiving(const Call& call, ShmState& state) : call_(call), state_(state), entries_(call.list.size()) {
    // What its owner has dropped and nobody holds: the mapping is the last that keeps it.
    std::erase_if(state_.remotes, [](const auto& item) {
      return item.second.use_count() == 1 && item.second->header().retired.load(std::memory_order_acquire) != 0;
    });
  }

  void move(std::span<const Record> records, ExchangeReport& report) {
    std::optional<Error> failure;
    for (std::size_t position = 1; position < call_.list.size(); ++position) {
      const int sender = call_.list[position];
      const Record& record = records[static_cast<std::size_t>(sender)];
      if (!record.has_value) continue;
      const Parcel parcel = take(sender, record);
      // Its own failure comes with the next round, in its own words.
      const bool is_whole =
          std::ranges::all_of(parcel.segments, [](const auto& segment) { return bool(segment.descriptor); });
      if (failure || !is_whole) continue;
      try {
        unpack(position, record, parcel, report);
      } catch (const Error& error) {
        failure = error.with_context(fmt::format("taking in what rank {} sent", sender));
      } catch (const std::bad_alloc&) {
        failure = Error(ErrorKind::no_space, fmt::format("taking in what rank {} sent: out of memory", sender));
      }
    }
    if (failure) throw *failure;
    for (const auto& [segment, bytes] : in_use_) segment->populate_known();
  }

  void commit() noexcept {
    for (const auto& lease : slot_leases_) lease->arm();
    for (const auto& [segment, bytes] : in_use_) segment->note_written(bytes);
  }

  std::vector<std::optional<Config>> deliver() {
    slot_leases_.clear();
    return std::move(entries_);
  }

 private:
  /// All that one sender hands over, taken before any of it is judged.
  struct Parcel {
    std::vector<std::byte> message;
    std::vector<DescriptorChannel::Received> segments;  // arenas first, then the slot's
  };

  Parcel take(int sender, const Record& record) {
    const WaitOptions wait = call_.wait("gather: receiving");
    constexpr std::uint64_t most_before_body = sizeof(MessageHeader) + 65536 * sizeof(ArenaEntry);
    Parcel parcel;
    MessageHeader header;
    do {
      parcel.message = call_.group->receive(sender, record.descriptor_bytes + most_before_body, wait);
      if (parcel.message.size() < sizeof header) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
      std::memcpy(&header, parcel.message.data(), sizeof header);
    } while (header.exchange != call_.number);
    const std::uint64_t before_body = sizeof header + header.arenas * sizeof(ArenaEntry);
    if (parcel.message.size() != before_body + record.descriptor_bytes)
      throw Error(ErrorKind::corrupt, "a message of a rank has not the length it announced");
    std::size_t expected = record.new_segment ? 1 : 0;
    for (std::uint32_t i = 0; i < header.arenas; ++i) expected += arena_entry(parcel, i).is_new != 0 ? 1 : 0;
    while (parcel.segments.size() < expected) {
      DescriptorChannel::Received received = call_.group->descriptor_channel()->receive(sender, wait);
      Note note;
      if (received.note.size() != sizeof note) throw Error(ErrorKind::corrupt, "a note of a rank has a wrong length");
      std::memcpy(&note, received.note.data(), sizeof note);
      if (note.exchange == call_.number) parcel.segments.push_back(std::move(received));
    }
    return parcel;
  }

  static ArenaEntry arena_entry(const Parcel& parcel, std::uint32_t index) {
    ArenaEntry entry;
    std::memcpy(&entry, parcel.message.data() + sizeof(MessageHeader) + index * sizeof entry, sizeof entry);
    return entry;
  }

  std::shared_ptr<shm::RemoteSegment> map(int sender, const os::Fd& memory) {
    auto segment = std::make_shared<shm::RemoteSegment>(memory);
    // An arena may be here already, from an exchange that failed later on: then the old mapping goes with its last
    // lease.
    state_.remotes[{sender, segment->id()}] = segment;
    return segment;
  }

  std::shared_ptr<shm::RemoteSegment> known(int sender, std::uint64_t id) const {
    const auto found = state_.remotes.find({sender, id});
    if (found == state_.remotes.end())
      throw Error(ErrorKind::corrupt, "the sender uses a segment that was never handed over");
    return found->second;
  }

  void unpack(std::size_t position, const Record& record, const Parcel& parcel, ExchangeReport& report) {
    const int sender = call_.list[position];
    MessageHeader header;
    std::memcpy(&header, parcel.message.data(), sizeof header);
    std::size_t next = 0;
    std::vector<std::shared_ptr<shm::ArenaLease>> arenas;
    for (std::uint32_t i = 0; i < header.arenas; ++i) {
      const ArenaEntry entry = arena_entry(parcel, i);
      if (entry.lease.word >= shm::lease_words) throw Error(ErrorKind::corrupt, "a lease has no place");
      auto segment = entry.is_new != 0 ? map(sender, parcel.segments[next++].descriptor) : known(sender, entry.segment);
      arenas.push_back(std::make_shared<shm::ArenaLease>(std::move(segment), entry.lease));
    }
    std::shared_ptr<shm::SlotLease> slot;
    if (record.moving_bytes != 0) {
      auto segment =
          record.new_segment ? map(sender, parcel.segments[next].descriptor) : known(sender, record.segment_id);
      if (record.moving_bytes > segment->capacity())
        throw Error(ErrorKind::corrupt, "more bytes than the segment has room for");
      slot = std::make_shared<shm::SlotLease>(segment, record.use);
      slot_leases_.push_back(slot);
      in_use_.emplace_back(std::move(segment), record.moving_bytes);
    }
    const auto body = std::span(parcel.message).last(record.descriptor_bytes);
    if (XXH3_64bits(body.data(), body.size()) != record.descriptor_hash)
      throw Error(ErrorKind::corrupt, "the descriptor is not the one that was announced");
    std::vector<std::vector<std::span<const std::byte>>> leased(arenas.size());
    entries_[position] =
        core::decode_descriptor(body, [&](DType dtype, const Shape& shape, std::uint64_t bytes, Place place) -> Tensor {
          const std::byte* base = nullptr;
          std::uint64_t room = 0;
          std::shared_ptr<const void> owner;
          if (place.segment == 0) {
            room = record.moving_bytes;
            if (slot) base = slot->segment().data();
            owner = slot;
          } else {
            if (place.segment > arenas.size())
              throw Error(ErrorKind::corrupt, "a tensor lies in an arena that was not handed over");
            const auto& arena = arenas[place.segment - 1];
            room = arena->segment().capacity();
            base = arena->segment().data();
            owner = arena;
            report.arena_bytes += bytes;
          }
          if (place.offset > room || bytes > room - place.offset)
            throw Error(ErrorKind::corrupt, "a tensor lies outside its segment");
          const std::byte* data = base == nullptr ? nullptr : base + place.offset;
          if (header.checks_leases != 0 && place.segment != 0) leased[place.segment - 1].emplace_back(data, bytes);
          return {TensorView(dtype, shape, data), std::move(owner)};
        });
    const RankInfo& info = call_.group->info(sender);
    for (std::uint32_t i = 0; i < header.arenas; ++i)
      if (!leased[i].empty())
        arenas[i]->watch(std::move(leased[i]), arena_entry(parcel, i).hash,
                         fmt::format("rank {} (host {}, pid {})", sender, info.host, info.pid));
  }

  const Call& call_;
  ShmState& state_;
  std::vector<std::optional<Config>> entries_;
  std::vector<std::shared_ptr<shm::SlotLease>> slot_leases_;
  std::vector<std::pair<std::shared_ptr<shm::RemoteSegment>, std::uint64_t>> in_use_;
};

class ShmTransfer final : public Transfer {
 public:
  explicit ShmTransfer(const Call& call) : call_(call), state_(state_of(*call.group)) {
    if (call_.is_first()) receiving_.emplace(call_, *state_);
    if (call_.is_sender() && call_.value != nullptr) sending_.emplace(call_, *state_);
  }

  void offer(Record& record) override {
    if (sending_) sending_->offer(record);
  }
  void move(std::span<const Record> records, ExchangeReport& report) override {
    if (sending_) sending_->move(report);
    if (receiving_) receiving_->move(records, report);
  }
  void commit() noexcept override {
    if (sending_) sending_->commit();
    if (receiving_) receiving_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    return receiving_ ? receiving_->deliver() : std::vector<std::optional<Config>>{};
  }
  std::vector<std::unique_ptr<Obligation>> obligations() override {
    return sending_ ? sending_->obligations() : std::vector<std::unique_ptr<Obligation>>{};
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  const Call& call_;
  std::shared_ptr<ShmState> state_;
  std::optional<Sending> sending_;
  std::optional<Receiving> receiving_;
};

class ShmRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::shm; }
  [[nodiscard]] bool is_usable(const Call& call) const override {
    return call.group->descriptor_channel() != nullptr &&
           std::ranges::all_of(call.list, [&](int rank) { return call.group->shares_memory(rank); });
  }
  [[nodiscard]] std::string reason() const override { return "all ranks of the list share memory"; }
  std::unique_ptr<Transfer> begin(const Call& call) const override { return std::make_unique<ShmTransfer>(call); }
  std::uint64_t trim(SyncGroup& group) const override { return state_of(group)->pool.trim(); }
  void clean_up(SyncGroup& group) const noexcept override {
    const auto state = state_of(group);
    for (int rank = 0; rank < group.size(); ++rank)
      if (rank != group.rank() && group.liveness(rank)->is_dead()) state->pool.drop(rank);
  }
};

}  // namespace

std::unique_ptr<RouteDriver> make_shm_route() {
  return std::make_unique<ShmRoute>();
}

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
// The shared memory route: as the exchange sees it, and its two sides.

#include "src/gather/shm_route.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <cstring>
#include "src/base/escaped.hpp"
#include "src/gather/route.hpp"
#include "src/os/process.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "src/core/descriptor.hpp"
#include "src/gather/opening.hpp"
#include "src/os/clock.hpp"
#include "src/os/fault.hpp"
#include "src/os/futex.hpp"

namespace muster::gather {
namespace {

/// More than a failed exchange can have left in front of a note.
constexpr std::uint64_t most_passed_over = 64 << 20;

struct Note {
  std::uint64_t exchange = 0;
  std::uint64_t segment = 0;
};

}  // namespace

std::shared_ptr<ShmState> shm_state_of(Group& group) {
  return group::inside(group).extension<ShmState>();
}

bool is_eager() {
  return os::environment("MUSTER_EAGER") != "0";
}

void tell(const GatherCall& call, int to, std::uint64_t segment, const char* phase) {
  Note note{call.number, segment};
  os::damage_descriptor(std::as_writable_bytes(std::span(&note, 1)));
  call.group->send(to, std::as_bytes(std::span(&note, 1)), call.wait(phase), group::Subject::exchange);
}

std::uint64_t hear(const GatherCall& call, int from, const char* phase) {
  Note note;
  const std::vector<std::byte> message = receive_of(call, from, most_passed_over, phase);
  if (message.size() != sizeof note)
    throw Error(ErrorKind::corrupt, "malformed message of a rank: wrong length of a note");
  std::memcpy(&note, message.data(), sizeof note);
  return note.segment;
}

namespace {

class ShmRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::shm; }
  [[nodiscard]] bool is_usable(const GatherCall& call) const override {
    return std::ranges::all_of(call.list, [&](int rank) { return call.group->region_of(rank) != nullptr; });
  }
  [[nodiscard]] std::string obstacle(const GatherCall& call) const override {
    if (call.group->region_of(call.group->rank()) == nullptr)
      return fmt::format("ranks of a {} group share no memory", in_quotes(call.group->kind()));
    const auto apart = std::ranges::find_if(call.list, [&](int rank) { return !call.group->shares_memory(rank); });
    const RankInfo& other = call.group->info(*apart);
    return fmt::format("shares no memory with rank {} (host {})", other.global_rank, other.host);
  }
  [[nodiscard]] std::string reason(const GatherCall&) const override { return "all ranks of the list share memory"; }
  std::unique_ptr<Transfer> begin(const GatherCall& call) const override {
    if (call.operation == GatherKind::merge) return make_shm_merge(call);
    if (call.is_first()) return std::make_unique<ShmReceiving>(call);
    return std::make_unique<ShmSending>(call);
  }
  std::uint64_t settle(Group& group, Keep keep) const override {
    return shm_state_of(group)->pool.settle(keep == Keep::free_memory);
  }
  std::uint64_t trim(Group& group) const override { return shm_state_of(group)->pool.trim(); }
  void clean_up(Group& failed) const noexcept override {
    group::BaseGroup& group = group::inside(failed);
    const auto state = shm_state_of(group);
    const std::lock_guard lock(state->cleaning);
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank == group.rank() || !group.liveness(rank)->is_dead()) continue;
      state->pool.drop(rank);
      // Its memory is freed when the last result that uses it is released.
      if (const auto region = group.region_of(rank)) region->let_go();
      state->remotes.forget(rank);
    }
  }
};

}  // namespace

std::unique_ptr<RouteDriver> make_shm_route() {
  return std::make_unique<ShmRoute>();
}

using core::TensorLocation;

void ShmReceiving::move(const Records& records, ExchangeReport& report) {
  std::optional<Error> failure;
  for (std::size_t position = 1; position < call_.list.size(); ++position) {
    const int sender = call_.list[position];
    const ExchangeRecord& record = records[static_cast<std::size_t>(sender)];
    if (!record.has_value) continue;
    std::optional<Error> trouble = attempt(*call_.group, [&] {
      const std::vector<std::byte> message = take(sender, record);
      if (!failure) unpack(position, record, message, report);
    });
    if (trouble && !failure)
      failure = trouble->with_context(fmt::format("data of rank {}", call_.group->info(sender).global_rank));
  }
  if (failure) throw *failure;
  for (const auto& [segment, bytes] : in_use_) segment->populate_known(bytes);
}

std::vector<std::byte> ShmReceiving::take(int sender, const ExchangeRecord& record) {
  constexpr std::uint64_t most_before_body = sizeof(MessageHeader) + 65536 * sizeof(ArenaEntry);
  if (record.complete) return written_message(sender, record);
  return receive_of(call_, sender, record.descriptor_bytes + most_before_body, "gather: receiving");
}

/// Returns the message behind the bytes of a slot. It is copied before it is validated, because the sender could change
/// it.
std::vector<std::byte> ShmReceiving::written_message(int sender, const ExchangeRecord& record) {
  const auto slot = segment(sender, record.segment);
  const std::uint64_t begin = message_place(record.moving_bytes);
  const std::uint64_t room = slot->capacity() - std::min(begin, slot->capacity());
  MessageHeader header;
  if (room >= sizeof header) std::memcpy(&header, slot->data() + begin, sizeof header);
  const std::uint64_t bytes = sizeof header + header.arenas * sizeof(ArenaEntry) + record.descriptor_bytes;
  if (header.exchange != call_.number || bytes > room || record.descriptor_bytes > room)
    throw Error(ErrorKind::corrupt, "malformed message of a rank: a slot does not contain the announced message");
  return {slot->data() + begin, slot->data() + begin + bytes};
}

std::shared_ptr<shm::RemoteSegment> ShmReceiving::segment(int sender, std::uint64_t place, os::Access access) {
  return state_->remotes.at(*call_.group, sender, place, access);
}

void ShmReceiving::unpack(std::size_t position, const ExchangeRecord& record, std::span<const std::byte> message,
                          ExchangeReport& report) {
  const int sender = call_.list[position];
  MessageHeader header;
  if (message.size() < sizeof header) throw Error(ErrorKind::corrupt, "malformed message of a rank: too short");
  std::memcpy(&header, message.data(), sizeof header);
  // The next round delivers the sender's own error.
  if (header.is_well == 0) return;
  if (message.size() != sizeof header + header.arenas * sizeof(ArenaEntry) + record.descriptor_bytes)
    throw Error(ErrorKind::corrupt, "malformed message of a rank: another length than announced");
  std::vector<ArenaEntry> entries(header.arenas);
  if (!entries.empty())
    std::memcpy(entries.data(), message.data() + sizeof header, entries.size() * sizeof(ArenaEntry));
  std::vector<std::shared_ptr<shm::Lease>> arenas;
  arenas.reserve(entries.size());
  for (const ArenaEntry& entry : entries)
    arenas.push_back(std::make_shared<shm::Lease>(segment(sender, entry.segment), entry.lease));
  std::shared_ptr<shm::Lease> slot;
  if (record.moving_bytes != 0) {
    auto moved = segment(sender, header.slot, call_.options->writable ? os::Access::read_write : os::Access::read_only);
    if (record.moving_bytes > moved->capacity())
      throw Error(ErrorKind::corrupt, "malformed message of a rank: more bytes than the segment holds");
    slot = std::make_shared<shm::Lease>(moved, header.lease);
    in_use_.emplace_back(std::move(moved), record.moving_bytes);
  }
  const auto body = message.last(record.descriptor_bytes);
  if (XXH3_64bits(body.data(), body.size()) != record.descriptor_hash)
    throw Error(ErrorKind::corrupt, "malformed message of a rank: the descriptor differs from the announced one");
  std::vector<std::vector<std::span<const std::byte>>> leased(arenas.size());
  entries_[position] = core::decode_descriptor(
      body, [&](DType dtype, const Shape& shape, std::uint64_t bytes, TensorLocation place) -> Tensor {
        const std::byte* base = nullptr;
        std::uint64_t room = 0;
        std::shared_ptr<const void> owner;
        if (place.segment == 0) {
          room = record.moving_bytes;
          if (slot) base = slot->segment().data();
          owner = slot;
        } else {
          if (place.segment > arenas.size())
            throw Error(ErrorKind::corrupt,
                        "malformed message of a rank: a tensor is in an arena that was not announced");
          const auto& arena = arenas[place.segment - 1];
          room = arena->segment().capacity();
          base = arena->segment().data();
          owner = arena;
          report.arena_bytes += bytes;
        }
        if (place.offset > room || bytes > room - place.offset)
          throw Error(ErrorKind::corrupt, "malformed message of a rank: a tensor is outside its segment");
        const std::byte* data = base == nullptr ? nullptr : base + place.offset;
        if (place.segment == 0 && slot && call_.options->writable)
          return {TensorView(dtype, shape, data), std::move(owner), slot->segment().mapping().data() + place.offset};
        if (header.checks_leases != 0 && place.segment != 0) leased[place.segment - 1].emplace_back(data, bytes);
        return {TensorView(dtype, shape, data), std::move(owner)};
      });
  for (std::uint32_t i = 0; i < header.arenas; ++i)
    if (!leased[i].empty())
      arenas[i]->watch(std::move(leased[i]), entries[i].hash, group::name_of(call_.group->info(sender)));
}

namespace {

using core::TensorLocation;
using detail::ArenaCore;
constexpr const char* copying = "gather: copying";

class LeaseObligation final : public OutstandingLease {
 public:
  /// `keeper` keeps the segment alive.
  LeaseObligation(std::shared_ptr<const void> keeper, shm::OwnedSegment& segment, shm::LeaseId lease,
                  std::shared_ptr<const group::PeerLiveness> holder)
      : keeper_(std::move(keeper)), segment_(segment), lease_(lease), holder_(std::move(holder)) {}
  [[nodiscard]] bool is_given_back() const noexcept override { return segment_.has_ended(lease_); }
  void withdraw() noexcept override { segment_.withdraw(lease_); }
  bool wait(os::Clock::time_point deadline) const override {
    if (os::spin_then_yield([&] { return is_given_back(); }, os::spin_iterations(2))) return true;
    for (;;) {
      if (is_given_back() || holder_->is_dead()) return true;
      const auto left = deadline - os::Clock::now();
      if (left <= os::Clock::duration::zero()) return false;
      segment_.sleep(lease_, std::min<os::Clock::duration>(left, std::chrono::milliseconds(20)));
    }
  }

 private:
  std::shared_ptr<const void> keeper_;
  shm::OwnedSegment& segment_;
  shm::LeaseId lease_;
  std::shared_ptr<const group::PeerLiveness> holder_;
};

}  // namespace

ShmSending::~ShmSending() {
  if (committed_) return;
  for (const LentArena& lent : lent_) lent.arena->segment().withdraw(lent.lease);
  if (!slot_) return;
  slot_->withdraw();
  state_->pool.discard(call_.first(), slot_);
}

void ShmSending::offer(ExchangeRecord& record) {
  if (call_.value == nullptr) return;
  auto body = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) { return place(tensor); });
  record.descriptor_bytes = body.size();
  record.descriptor_hash = XXH3_64bits(body.data(), body.size());
  os::damage_descriptor(body);
  message_ = message(body);
  // The root may be unable to map a new arena. A closing round then reports the failure to all ranks.
  record.closes = std::ranges::any_of(lent_, &LentArena::is_new);
  record.moving_bytes = layout_.size();
  record.payload_bytes = moving_payload_ + arena_payload_;
  if (layout_.size() == 0) return;
  const std::uint64_t with_message = message_place(layout_.size()) + message_.size();
  is_small_ = layout_.size() <= most_eager && message_.size() <= most_eager_message && call_.filler == nullptr &&
              !call_.stage && is_eager();
  const GatherOptions& options = *call_.options;
  // A slot of a stream has the size of a part, and holds the message only if there is room for it.
  plan_ = state_->pool.plan(call_.first(), is_small_ && !call_.is_part ? with_message : layout_.size(),
                            {options.pipeline_depth, options.memory_budget, options.pool_limit,
                             call_.group->info(call_.first()).global_rank});
  record.held = plan_.held;
  const os::Backing backing = group::Region::own()->backing();
  const bool is_ready = plan_.slot && plan_.slot->is_taken(with_message);
  if (is_small_ && !record.closes && (is_ready || (backing == os::Backing::anonymous && !call_.is_part))) {
    // A closing round is needed unless the root is known to have mapped the slot.
    record.closes = !is_ready || !plan_.slot->is_known();
    lend_slot();
    record.segment = slot_->segment().place();
    write();
    record.complete = is_written_ = true;
    return;
  }
  record.fresh_bytes = plan_.fresh_bytes;
  if (plan_.fresh_bytes == 0) return;
  const os::MemoryHeadroom room = os::memory_headroom(backing);
  record.available_bytes = room.bytes;
  record.limit = room.limit;
}

void ShmSending::move(const Records&, ExchangeReport& report) {
  report.arena_bytes = arena_payload_;
  if (is_written_ || call_.value == nullptr) return;
  if (layout_.size() != 0) {
    try {
      lend_slot();
    } catch (...) {
      const MessageHeader nothing{.exchange = call_.number};
      send(std::as_bytes(std::span(&nothing, 1)));
      throw;
    }
  }
  send(message_);
  if (layout_.size() == 0) return;
  if (call_.filler != nullptr) {
    call_.filler->fill(slot_, layout_.size(), moving_);
    return;
  }
  write();
}

/// Creates the slot if there is none, lends it to the root, and writes its place and lease into the message.
void ShmSending::lend_slot() {
  slot_ = state_->pool.carry_out(call_.first(), std::move(plan_));
  MessageHeader header;
  std::memcpy(&header, message_.data(), sizeof header);
  header.slot = slot_->segment().place();
  header.lease = slot_lease_ = slot_->lend(call_.group->liveness(call_.first()));
  std::memcpy(message_.data(), &header, sizeof header);
}

void ShmSending::send(std::span<const std::byte> message) const {
  call_.group->send(call_.first(), message, call_.wait(copying), group::Subject::exchange);
}

void ShmSending::write() {
  shm::SlotWriter writer(*slot_, [&] { call_.group->progress(); });
  for (const auto& [offset, tensor] : moving_) writer.write(offset, tensor->view());
  // Written even if the root does not read it here: its memory is then taken, and the next exchange finds the slot
  // ready.
  const std::uint64_t place = message_place(layout_.size());
  if (is_small_ && place + message_.size() <= slot_->segment().capacity()) writer.write(place, message_);
  writer.finish();
}

void ShmSending::commit() noexcept {
  committed_ = true;
  if (slot_) slot_->set_known();
  if (lent_.empty()) return;
  for (const LentArena& lent : lent_) state_->arenas_sent[{call_.first(), lent.arena->segment().place()}] = lent.arena;
  std::erase_if(state_->arenas_sent, [](const auto& sent) { return sent.second.expired(); });
}

std::vector<std::unique_ptr<OutstandingLease>> ShmSending::obligations() {
  std::vector<std::unique_ptr<OutstandingLease>> all;
  const auto holder = call_.group->liveness(call_.first());
  if (slot_) all.push_back(std::make_unique<LeaseObligation>(slot_, slot_->segment(), slot_lease_, holder));
  for (const LentArena& lent : lent_)
    all.push_back(std::make_unique<LeaseObligation>(lent.arena, lent.arena->segment(), lent.lease, holder));
  return all;
}

std::optional<TensorLocation> ShmSending::place(const Tensor& tensor) {
  const std::uint64_t bytes = tensor.nbytes();
  if (tensor.view().is_contiguous() && bytes != 0 && tensor.device().is_host()) {
    if (const auto found = ArenaCore::find(tensor.data(), bytes)) {
      arena_payload_ += bytes;
      const std::uint32_t number = lend(found->arena);
      if (call_.options->debug.detect_writes) lent_[number - 1].watched.push_back(tensor.bytes());
      return TensorLocation{number, found->offset};
    }
  }
  moving_payload_ += bytes;
  moving_.emplace_back(layout_.place(bytes), &tensor);
  return std::nullopt;
}

std::uint32_t ShmSending::lend(const std::shared_ptr<ArenaCore>& arena) {
  for (std::size_t i = 0; i < lent_.size(); ++i)
    if (lent_[i].arena == arena) return static_cast<std::uint32_t>(i + 1);
  // The entry is created now, because commit() must not fail.
  const bool is_new = state_->arenas_sent[{call_.first(), arena->segment().place()}].expired();
  lent_.push_back({arena, {}, {}, is_new});
  lent_.back().lease = arena->lend(call_.group->liveness(call_.first()));
  return static_cast<std::uint32_t>(lent_.size());
}

std::vector<std::byte> ShmSending::message(std::span<const std::byte> body) const {
  std::vector<std::byte> bytes;
  append(bytes, MessageHeader{.exchange = call_.number,
                              .arenas = static_cast<std::uint32_t>(lent_.size()),
                              .checks_leases = call_.options->debug.detect_writes ? std::uint16_t{1} : std::uint16_t{0},
                              .is_well = 1});
  for (const LentArena& lent : lent_)
    append(bytes, ArenaEntry{lent.arena->segment().place(), lent.lease, shm::hash_parts(lent.watched)});
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

}  // namespace muster::gather

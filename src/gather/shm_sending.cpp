// SPDX-License-Identifier: Apache-2.0
#include "src/gather/shm_protocol.hpp"
#include "src/os/clock.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "src/os/fault.hpp"
#include "src/os/futex.hpp"

namespace muster::gather {
namespace {

using core::Place;
using detail::ArenaCore;
constexpr const char* copying = "gather: copying";

class LeaseObligation final : public Obligation {
 public:
  /// `keeper` keeps the segment alive.
  LeaseObligation(std::shared_ptr<const void> keeper, shm::OwnedSegment& segment, shm::LeaseId lease,
                  std::shared_ptr<const sync::PeerLiveness> holder)
      : keeper_(std::move(keeper)), segment_(segment), lease_(lease), holder_(std::move(holder)) {}
  [[nodiscard]] bool is_given_back() const noexcept override { return segment_.has_ended(lease_); }
  void withdraw() noexcept override { segment_.withdraw(lease_); }
  bool wait(os::Clock::time_point deadline) const override {
    if (os::comes_soon([&] { return is_given_back(); }, os::turns_on_core(2))) return true;
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
  std::shared_ptr<const sync::PeerLiveness> holder_;
};

}  // namespace

ShmSending::~ShmSending() {
  if (committed_) return;
  for (const Lent& lent : lent_) lent.arena->segment().withdraw(lent.lease);
  if (!slot_) return;
  slot_->withdraw();
  state_->pool.discard(call_.first(), slot_);
}

void ShmSending::offer(Record& record) {
  if (call_.value == nullptr) return;
  auto body = core::encode_descriptor(*call_.value, [&](const Tensor& tensor) { return place(tensor); });
  record.descriptor_bytes = body.size();
  record.descriptor_hash = XXH3_64bits(body.data(), body.size());
  os::damage_descriptor(body);
  message_ = message(body);
  // The root may be unable to map a new arena. A closing round then reports the failure to all ranks.
  record.closes = std::ranges::any_of(lent_, &Lent::is_new);
  record.moving_bytes = layout_.size();
  record.payload_bytes = moving_payload_ + arena_payload_;
  if (layout_.size() == 0) return;
  const std::uint64_t with_message = message_place(layout_.size()) + message_.size();
  is_small_ = layout_.size() <= most_eager && message_.size() <= most_eager_message && call_.filler == nullptr &&
              !call_.stage && is_eager();
  const GatherOptions& options = *call_.options;
  // A slot of a stream has the size of a part, and holds the message only if there is room for it.
  plan_ = state_->pool.plan(call_.first(), is_small_ && !call_.is_part ? with_message : layout_.size(),
                            {options.pipeline_depth, options.memory_budget, options.pool_limit});
  record.held = plan_.held;
  const os::Backing backing = sync::Region::own()->backing();
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

void ShmSending::move(std::span<const Record>, ExchangeReport& report) {
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
  call_.group->send(call_.first(), message, call_.wait(copying), sync::Subject::exchange);
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
  for (const Lent& lent : lent_) state_->arenas_sent[{call_.first(), lent.arena->segment().place()}] = lent.arena;
  std::erase_if(state_->arenas_sent, [](const auto& sent) { return sent.second.expired(); });
}

std::vector<std::unique_ptr<Obligation>> ShmSending::obligations() {
  std::vector<std::unique_ptr<Obligation>> all;
  const auto holder = call_.group->liveness(call_.first());
  if (slot_) all.push_back(std::make_unique<LeaseObligation>(slot_, slot_->segment(), slot_lease_, holder));
  for (const Lent& lent : lent_)
    all.push_back(std::make_unique<LeaseObligation>(lent.arena, lent.arena->segment(), lent.lease, holder));
  return all;
}

std::optional<Place> ShmSending::place(const Tensor& tensor) {
  const std::uint64_t bytes = tensor.nbytes();
  if (tensor.view().is_contiguous() && bytes != 0 && tensor.device().is_host()) {
    if (const auto found = ArenaCore::find(tensor.data(), bytes)) {
      arena_payload_ += bytes;
      const std::uint32_t number = lend(found->arena);
      if (call_.options->debugging.check_leases) lent_[number - 1].watched.push_back(tensor.bytes());
      return Place{number, found->offset};
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
  append(bytes,
         MessageHeader{.exchange = call_.number,
                       .arenas = static_cast<std::uint32_t>(lent_.size()),
                       .checks_leases = call_.options->debugging.check_leases ? std::uint16_t{1} : std::uint16_t{0},
                       .is_well = 1});
  for (const Lent& lent : lent_)
    append(bytes, ArenaEntry{lent.arena->segment().place(), lent.lease, shm::hash_parts(lent.watched)});
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

}  // namespace muster::gather

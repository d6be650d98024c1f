// SPDX-License-Identifier: Apache-2.0
#include "src/shm/slot.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "src/base/message.hpp"
#include "src/os/pages.hpp"
#include "src/shm/stream_copy.hpp"

namespace muster::shm {
namespace {

constexpr std::uint64_t piece_bytes = 4 << 20;    // bytes between two progress reports
constexpr std::uint64_t staging_bytes = 1 << 20;  // small tensors are joined up to this size
constexpr std::uint64_t small_bytes = 64 << 10;

/// Returns a capacity with room to grow if that is free: untouched anonymous memory costs nothing. POSIX memory is
/// reserved, so the exact size is requested.
std::uint64_t capacity_for(std::uint64_t bytes, group::Region& region) {
  const std::uint64_t exact = os::whole_pages(std::max<std::uint64_t>(bytes, 1), os::page_size());
  if (region.backing() == os::Backing::posix) return exact;
  const std::uint64_t roomy = std::bit_ceil(std::max<std::uint64_t>(exact, 1 << 20));
  return roomy <= region.room() / 4 ? roomy : exact;
}

}  // namespace

void Slot::give_back() noexcept {
  segment_.attach(nullptr);
  segment_.punch();
  backed_ = ready_ = 0;
  reserved_ = false;
  populated_.forget();
}

void Slot::take(std::uint64_t bytes) {
  if (must_reserve_ && !reserved_) {
    segment_.reserve();
    reserved_ = true;
  }
  backed_ = std::max(backed_, bytes);
}

SlotWriter::SlotWriter(Slot& slot, std::function<void()> progress) : slot_(slot), progress_(std::move(progress)) {
  slot_.take(0);
  if (slot_.ready_ < slot_.backed_) {
    slot_.segment_.mapping().populate(os::Access::read_write, header_bytes + slot_.ready_,
                                      slot_.backed_ - slot_.ready_);
    slot_.ready_ = slot_.backed_;
  }
}

void SlotWriter::write(std::uint64_t offset, const TensorView& tensor) {
  if (tensor.nbytes() == 0) return;
  if (tensor.is_contiguous()) {
    write(offset, tensor.bytes());
    return;
  }
  end_ = offset + tensor.nbytes();
  flush();
  copy_contiguous(tensor, slot_.segment_.data() + offset);
  progress_();
}

void SlotWriter::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  end_ = offset + bytes.size();
  while (!bytes.empty()) {
    if (offset >= slot_.ready_) {
      write_fresh(offset, bytes);
      return;
    }
    const std::uint64_t piece = std::min<std::uint64_t>({bytes.size(), slot_.ready_ - offset, piece_bytes});
    stream_copy(slot_.segment_.data() + offset, bytes.data(), piece);
    offset += piece;
    bytes = bytes.subspan(piece);
    if (piece == piece_bytes) progress_();
  }
}

void SlotWriter::write_fresh(std::uint64_t offset, std::span<const std::byte> bytes) {
  if (bytes.size() < small_bytes) {
    const std::uint64_t gap = staged_.empty() ? 0 : offset - (staged_at_ + staged_.size());
    if (staged_.size() + gap + bytes.size() > staging_bytes || gap > small_bytes) flush();
    if (staged_.empty()) {
      staged_.reserve(staging_bytes);
      staged_at_ = offset;
    } else {
      staged_.resize(staged_.size() + gap);
    }
    staged_.insert(staged_.end(), bytes.begin(), bytes.end());
    return;
  }
  flush();
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min<std::uint64_t>(bytes.size(), piece_bytes));
    slot_.segment_.write(offset, piece);
    offset += piece.size();
    bytes = bytes.subspan(piece.size());
    progress_();
  }
}

void SlotWriter::flush() {
  if (staged_.empty()) return;
  slot_.segment_.write(staged_at_, staged_);
  staged_.clear();
  progress_();
}

void SlotWriter::finish() {
  flush();
  publish_fence();
  slot_.backed_ = std::max(slot_.backed_, end_);
}

SenderPool::SlotLane& SenderPool::lane(LaneId id) {
  for (SlotLane& lane : lanes_)
    if (lane.id == id) return lane;
  return lanes_.emplace_back(SlotLane{id, {}});
}

std::uint32_t SenderPool::held(LaneId id) const noexcept {
  const auto lane = std::ranges::find(lanes_, id, &SlotLane::id);
  if (lane == lanes_.end()) return 0;
  return static_cast<std::uint32_t>(
      std::ranges::count_if(lane->slots, [](const auto& slot) { return !slot->is_free(); }));
}

SlotPlan SenderPool::plan(LaneId id, std::uint64_t bytes, const SlotLimits& limits) {
  SlotLane& lane = this->lane(id);
  SlotPlan plan;
  plan.held = held(id);
  // Slots beyond the pipeline depth are deleted as soon as they are free.
  for (auto slot = lane.slots.begin();
       slot != lane.slots.end() && lane.slots.size() > static_cast<std::size_t>(limits.pipeline_depth);)
    slot = (*slot)->is_free() ? lane.slots.erase(slot) : slot + 1;
  // Prefer the most recently used slot that is large enough, because its memory is the warmest. Otherwise replace the
  // most recently used free slot.
  for (auto slot = lane.slots.rbegin(); slot != lane.slots.rend() && !plan.slot; ++slot) {
    if (!(*slot)->is_free()) continue;
    if ((*slot)->segment().capacity() >= bytes)
      plan.slot = *slot;
    else if (!plan.replaces)
      plan.replaces = *slot;
  }
  if (plan.slot) plan.replaces = nullptr;
  if (plan.slot) {
    plan.fresh_bytes = bytes - std::min(bytes, plan.slot->backed());
  } else {
    const std::shared_ptr<group::Region> region = group::Region::own();
    plan.capacity = capacity_for(bytes, *region);
    plan.fresh_bytes = header_bytes + (region->backing() == os::Backing::posix ? plan.capacity : bytes);
    region->check(header_bytes + plan.capacity);
  }
  // Free memory beyond the limit is given back, least recently used slots first. If the budget is short, so is all free
  // memory.
  std::uint64_t pool = this->bytes();
  std::uint64_t free = 0;
  for (const SlotLane& each : lanes_)
    for (const auto& slot : each.slots)
      if (slot->is_free() && slot != plan.slot) free += slot->backed();
  for (SlotLane& each : lanes_) {
    for (const auto& slot : each.slots) {
      const bool over = free > limits.pool_limit || pool + plan.fresh_bytes > limits.memory_budget;
      if (!over || !slot->is_free() || slot == plan.slot) continue;
      free -= slot->backed();
      pool -= slot->backed();
      slot->give_back();
    }
  }
  if (pool + plan.fresh_bytes > limits.memory_budget)
    throw Error(ErrorKind::out_of_space,
                plan.held != 0
                    ? fmt::format("shared memory: rank {} holds {} of this rank ({}), and {} more would exceed "
                                  "the memory budget of {}. Release a result, or raise memory_budget",
                                  limits.root, counted(plan.held, "result"), byte_text(pool),
                                  byte_text(plan.fresh_bytes), byte_text(limits.memory_budget))
                    : fmt::format("shared memory: needed {}, but the memory budget is {}. Raise memory_budget",
                                  byte_text(pool + plan.fresh_bytes), byte_text(limits.memory_budget)));
  return plan;
}

std::shared_ptr<Slot> SenderPool::carry_out(LaneId id, SlotPlan plan) {
  SlotLane& lane = this->lane(id);
  std::shared_ptr<Slot> slot = plan.slot;
  if (slot) {
    std::erase(lane.slots, slot);
  } else {
    if (plan.replaces) std::erase(lane.slots, plan.replaces);
    plan.replaces = nullptr;  // frees its memory before the new slot takes more
    slot = std::make_shared<Slot>(plan.capacity);
  }
  lane.slots.push_back(slot);
  return slot;
}

std::uint64_t SenderPool::bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const SlotLane& lane : lanes_)
    for (const auto& slot : lane.slots) sum += slot->backed();
  return sum;
}

std::uint64_t SenderPool::settle(bool keep_free) noexcept {
  for (SlotLane& lane : lanes_)
    std::erase_if(lane.slots, [&](const auto& slot) { return !keep_free || !slot->is_free(); });
  return bytes();
}

void SenderPool::discard(LaneId id, const std::shared_ptr<Slot>& slot) noexcept {
  if (!slot->is_known()) std::erase(lane(id).slots, slot);
}

std::uint64_t SenderPool::trim() noexcept {
  std::uint64_t sum = 0;
  for (const SlotLane& lane : lanes_) {
    for (const auto& slot : lane.slots) {
      if (!slot->is_free()) continue;
      sum += slot->backed();
      slot->give_back();
    }
  }
  return sum;
}

void SenderPool::drop(int first) noexcept {
  lane(first).slots.clear();
}

}  // namespace muster::shm

// SPDX-License-Identifier: Apache-2.0
#include "src/group/control_block.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include "src/base/fixed_string.hpp"
#include "src/os/futex.hpp"

namespace muster::group {
namespace {

constexpr std::uint64_t page = 4096;

std::uint64_t round_up(std::uint64_t bytes) {
  return (bytes + page - 1) / page * page;
}

std::uint64_t cells_offset() {
  return round_up(sizeof(ControlHeader));
}
std::uint64_t records_offset(int size) {
  return cells_offset() + round_up(static_cast<std::uint64_t>(size) * sizeof(RankCell));
}
std::uint64_t in_use_offset(int size) {
  return records_offset(size) + round_up(2 * static_cast<std::uint64_t>(size) * Group::max_record);
}
std::uint64_t pieces_offset(int size) {
  return in_use_offset(size) + round_up(static_cast<std::uint64_t>(size) * static_cast<std::uint64_t>(size));
}
std::uint64_t rings_offset(int size) {
  return pieces_offset(size) + 2 * answer_piece;
}

/// Room for everything that a receiver may have to keep (Mail::promised), with the packet heads, and for some more
/// packets.
constexpr std::uint64_t ring_bytes = 256 * 1024 + 12 * page;
static_assert(ring_bytes > Mail::promised + Mail::promised / Mail::least_cost * (sizeof(PacketHead) + 8) + page);

std::uint64_t ring_offset(int size, int from, int to) {
  const int pair = from * (size - 1) + (to < from ? to : to - 1);
  return rings_offset(size) + static_cast<std::uint64_t>(pair) * ring_bytes;
}
std::uint64_t block_bytes(int size) {
  return rings_offset(size) + static_cast<std::uint64_t>(size) * static_cast<std::uint64_t>(size - 1) * ring_bytes;
}

/// Returns how many bytes of the block a rank maps when it opens the block.
std::uint64_t mapped_bytes(int size) {
  constexpr std::uint64_t most = 256 << 20;  // about twenty ranks; the address space may be limited
  return block_bytes(size) <= most ? block_bytes(size) : rings_offset(size);
}

/// Stores `cause` in the cell. Returns false if the cell already holds a failure.
bool put(FailureCell& cell, const Error& cause) noexcept {
  std::uint32_t none = FailureCell::none;
  if (!cell.state.compare_exchange_strong(none, FailureCell::being_written)) return false;
  cell.error.put(cause);
  cell.state.store(FailureCell::published, std::memory_order_seq_cst);
  return true;
}

std::optional<Error> get(const FailureCell& cell) {
  if (cell.state.load(std::memory_order_acquire) == FailureCell::none) return std::nullopt;
  // The rank that claimed the cell publishes its error within microseconds, unless it was killed in between.
  for (int turn = 0; turn < 100 && cell.state.load(std::memory_order_acquire) != FailureCell::published; ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (cell.state.load(std::memory_order_acquire) != FailureCell::published)
    return Error(ErrorKind::peer_lost,
                 "the group failed, and the rank that failed first died before it reported the cause");
  return cell.error.get();
}

}  // namespace

void WakeWord::ring() noexcept {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (waiting.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(word);
}

Ring::Ring(const os::Fd& memory, std::uint64_t at, std::uint64_t bytes, std::byte* mapped, bool reserves)
    : memory_(memory),
      at_(at),
      bytes_(bytes),
      mapping_(mapped != nullptr ? os::Mapping() : os::Mapping(memory, os::Access::read_write, at, bytes)),
      begin_(mapped != nullptr ? mapped : mapping_.data()),
      reserved_(reserves ? 0 : bytes) {
  reserve_until(sizeof(RingHead));
}

void Ring::reserve_until(std::uint64_t end) {
  if (end <= reserved_) return;
  const std::uint64_t whole = round_up(end);
  os::reserve(memory_, at_ + reserved_, whole - reserved_);
  reserved_ = whole;
}

template <class Copy>
void Ring::around(std::uint64_t position, std::uint64_t bytes, const Copy& copy) const {
  const std::uint64_t begin = (position - head().origin.load(std::memory_order_relaxed)) % capacity();
  const std::uint64_t first = std::min(bytes, capacity() - begin);
  std::byte* const data = begin_ + sizeof(RingHead);
  copy(data + begin, std::uint64_t{0}, first);
  if (first < bytes) copy(data, first, bytes - first);
}

std::uint64_t Ring::filled() const noexcept {
  return head().written.load(std::memory_order_acquire) - head().read.load(std::memory_order_acquire);
}

std::uint64_t Ring::write(std::span<const std::byte> bytes) {
  const std::uint64_t written = head().written.load(std::memory_order_relaxed);
  const std::uint64_t there = filled();
  // An empty ring starts again at its first byte, so that short messages always use the same few pages.
  if (there == 0) head().origin.store(written, std::memory_order_relaxed);
  const std::uint64_t piece = std::min<std::uint64_t>(capacity() - there, bytes.size());
  const std::uint64_t begin = (written - head().origin.load(std::memory_order_relaxed)) % capacity();
  reserve_until(sizeof(RingHead) + std::min(begin + piece, capacity()));
  around(written, piece, [&](std::byte* at, std::uint64_t from, std::uint64_t length) {
    std::memcpy(at, bytes.data() + from, length);
  });
  head().written.store(written + piece, std::memory_order_release);
  return piece;
}

void Ring::peek(std::span<std::byte> bytes) const noexcept {
  around(
      head().read.load(std::memory_order_relaxed), bytes.size(),
      [&](const std::byte* at, std::uint64_t to, std::uint64_t length) { std::memcpy(bytes.data() + to, at, length); });
}

void Ring::take(std::uint64_t bytes) noexcept {
  head().read.fetch_add(bytes, std::memory_order_release);
}

ControlBlock::ControlBlock(std::shared_ptr<const os::Fd> memory, std::uint64_t place, int size)
    : memory_(std::move(memory)),
      place_(place),
      size_(size),
      mapping_(*memory_, os::Access::read_write, place, mapped_bytes(size)) {}

std::shared_ptr<ControlBlock> ControlBlock::create(Region& region, int size) {
  // Fresh shared memory is zero, and zero is the initial state of every field in it.
  const std::uint64_t place = region.take(block_bytes(size));
  const bool reserves = region.must_reserve();
  std::shared_ptr<ControlBlock> block(new ControlBlock(region.memory(), place, size));
  if (reserves) os::reserve(*block->memory_, place, pieces_offset(size));
  block->header().layout = group_layout;
  block->header().size = static_cast<std::uint32_t>(size);
  block->header().reserves_rings = reserves ? 1 : 0;
  return block;
}

std::shared_ptr<ControlBlock> ControlBlock::open(const Region& region, std::uint64_t place, int size) {
  const std::uint64_t bytes = block_bytes(size);
  if (bytes > region.size() || place > region.size() - bytes)
    throw Error(ErrorKind::corrupt, "malformed control block of the group: too small for " + std::to_string(size) +
                                        " ranks. Use one build of Muster on all ranks");
  std::shared_ptr<ControlBlock> block(new ControlBlock(region.memory(), place, size));
  if (const std::uint32_t layout = block->header().layout; layout != group_layout)
    throw Error(ErrorKind::version, "control block of the group: opening it: it has layout " + std::to_string(layout) +
                                        ", and this rank has layout " + std::to_string(group_layout) +
                                        ". Install the same version of Muster on all hosts");
  if (block->header().size != static_cast<std::uint32_t>(size))
    throw Error(ErrorKind::corrupt,
                "malformed control block of the group: it is for another number of ranks. Use one build of Muster on "
                "all ranks");
  return block;
}

void ControlBlock::leave(int self, const Peers& peers) noexcept {
  // A rank that has counted itself no longer accesses the block, so the rank that counts last frees it. Each leaving
  // rank also counts the dead ranks, and the shared count keeps the largest number that any rank has seen.
  constexpr int dead_bits = 32;
  std::uint64_t dead = 0;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != self && cell(rank).left.load(std::memory_order_seq_cst) == 0 && peers.has_ended(rank)) ++dead;
  cell(self).left.store(1, std::memory_order_seq_cst);
  std::uint64_t seen = header().left.load(std::memory_order_relaxed);
  std::uint64_t left = 0;
  do {
    dead = std::max(dead, seen >> dead_bits);
    left = (seen & UINT32_MAX) + 1;
  } while (!header().left.compare_exchange_weak(seen, dead << dead_bits | left, std::memory_order_acq_rel));
  if (left + dead == static_cast<std::uint64_t>(size_)) give_back();
}

void ControlBlock::give_back() noexcept {
  os::punch_hole(*memory_, place_, block_bytes(size_));
}

ControlHeader& ControlBlock::header() const noexcept {
  return *reinterpret_cast<ControlHeader*>(mapping_.data());
}

RankCell& ControlBlock::cell(int rank) const noexcept {
  return reinterpret_cast<RankCell*>(mapping_.data() + cells_offset())[rank];
}

std::byte* ControlBlock::record(std::uint32_t round, int rank, std::size_t bytes) const noexcept {
  const std::uint64_t begin =
      static_cast<std::uint64_t>(round & 1) * static_cast<std::uint64_t>(size_) * Group::max_record;
  // Each rank writes its own cache lines.
  const std::uint64_t distance = (bytes + 63) / 64 * 64;
  return mapping_.data() + records_offset(size_) + begin + static_cast<std::uint64_t>(rank) * distance;
}

void ControlBlock::reserve_pieces() const {
  if (header().reserves_rings != 0) os::reserve(*memory_, place_ + pieces_offset(size_), 2 * answer_piece);
}

std::byte* ControlBlock::piece(std::uint32_t number) const noexcept {
  return mapping_.data() + pieces_offset(size_) + (number & 1) * answer_piece;
}

std::atomic<std::uint8_t>& ControlBlock::ring_in_use(int from, int to) const noexcept {
  return reinterpret_cast<std::atomic<std::uint8_t>*>(mapping_.data() + in_use_offset(size_))[from * size_ + to];
}

bool ControlBlock::has_ring(int from, int to) const noexcept {
  return ring_in_use(from, to).load(std::memory_order_acquire) != 0;
}

Ring ControlBlock::ring(int from, int to, bool reserves) const {
  const std::uint64_t at = ring_offset(size_, from, to);
  std::byte* const mapped = at < mapping_.size() ? mapping_.data() + at : nullptr;
  return {*memory_, place_ + at, ring_bytes, mapped, reserves};
}

Ring ControlBlock::make_ring(int from, int to) const {
  Ring ring = this->ring(from, to, header().reserves_rings != 0);
  ring_in_use(from, to).store(1, std::memory_order_release);
  return ring;
}

Ring ControlBlock::map_ring(int from, int to) const {
  return ring(from, to, false);
}

void ControlBlock::abort(const Error& cause) noexcept {
  if (!put(header().failure, cause)) return;
  os::futex_wake_all(header().round);
  os::futex_wake_all(header().pieces.word);
  for (int rank = 0; rank < size_; ++rank) os::futex_wake_all(this->cell(rank).bell.word);
}

std::optional<Error> ControlBlock::error() const {
  return get(header().failure);
}

void ControlBlock::decide(const Error& cause) noexcept {
  put(header().decision, cause);
}

std::optional<Error> ControlBlock::decision() const {
  return get(header().decision);
}

void ControlBlock::set_phase(int rank, std::string_view phase) noexcept {
  std::array<char, phase_words * 8> text{};
  put_text(text, phase);
  RankCell& target = cell(rank);
  for (std::size_t i = 0; i < phase_words; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i * 8, 8);
    target.phase[i].store(word, std::memory_order_relaxed);
  }
}

std::string ControlBlock::phase(int rank) const {
  std::array<char, phase_words * 8> text{};
  for (std::size_t i = 0; i < phase_words; ++i) {
    const std::uint64_t word = cell(rank).phase[i].load(std::memory_order_relaxed);
    std::memcpy(text.data() + i * 8, &word, 8);
  }
  return get_text(text);
}

}  // namespace muster::group

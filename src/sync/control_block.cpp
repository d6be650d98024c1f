// SPDX-License-Identifier: Apache-2.0
#include "src/sync/control_block.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "src/base/fixed_text.hpp"
#include "src/os/futex.hpp"

namespace muster::sync {
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
std::uint64_t rings_offset(int size) {
  return records_offset(size) + round_up(2 * static_cast<std::uint64_t>(size) * SyncGroup::max_record);
}
std::uint64_t block_bytes(int size) {
  return rings_offset(size) + static_cast<std::uint64_t>(size) * ring_bytes;
}

/// False where there is one already.
bool put(FailureCell& cell, const Error& cause) noexcept {
  std::uint32_t none = FailureCell::none;
  if (!cell.state.compare_exchange_strong(none, FailureCell::being_written)) return false;
  cell.kind = static_cast<std::uint32_t>(cause.kind());
  cell.rank = cause.rank().value_or(-1);
  cell.os_error = cause.os_error();
  cell.pid = cause.pid().value_or(-1);
  put_text(cell.host, cause.host());
  put_text(cell.text, cause.what());
  cell.state.store(FailureCell::published, std::memory_order_seq_cst);
  return true;
}

std::optional<Error> get(const FailureCell& cell) {
  if (cell.state.load(std::memory_order_acquire) == FailureCell::none) return std::nullopt;
  // Whoever claimed the cell publishes within microseconds, unless it was killed in between.
  for (int turn = 0; turn < 100 && cell.state.load(std::memory_order_acquire) != FailureCell::published; ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (cell.state.load(std::memory_order_acquire) != FailureCell::published)
    return Error(ErrorKind::peer_lost, "the group failed, and the rank that knew why died while saying so");
  ErrorDetails details;
  if (cell.rank >= 0) details.rank = cell.rank;
  if (cell.pid >= 0) details.pid = cell.pid;
  details.host = get_text(cell.host);
  details.os_error = cell.os_error;
  return Error(static_cast<ErrorKind>(cell.kind), get_text(cell.text), details);
}

}  // namespace

ControlBlock::ControlBlock(os::Fd memory, int size)
    : memory_(std::move(memory)), size_(size), mapping_(memory_, os::Access::read_write, 0, block_bytes(size)) {}

std::shared_ptr<ControlBlock> ControlBlock::create(int size) {
  // Fresh shared memory is zero, and zero is the first state of every word in it.
  std::shared_ptr<ControlBlock> block(
      new ControlBlock(os::create_shared_memory(block_bytes(size), os::default_backing()), size));
  block->header().size = static_cast<std::uint32_t>(size);
  return block;
}

std::shared_ptr<ControlBlock> ControlBlock::open(os::Fd memory, int size) {
  if (os::shared_memory_size(memory) != block_bytes(size))
    throw Error(ErrorKind::corrupt, "the group's control block has not the size that " + std::to_string(size) +
                                        " ranks need: are all ranks of one build?");
  std::shared_ptr<ControlBlock> block(new ControlBlock(std::move(memory), size));
  if (block->header().size != static_cast<std::uint32_t>(size))
    throw Error(ErrorKind::corrupt, "the group's control block is for another number of ranks");
  return block;
}

ControlHeader& ControlBlock::header() const noexcept {
  return *reinterpret_cast<ControlHeader*>(mapping_.data());
}

RankCell& ControlBlock::cell(int rank) const noexcept {
  return reinterpret_cast<RankCell*>(mapping_.data() + cells_offset())[rank];
}

std::byte* ControlBlock::record(std::uint32_t round, int rank, std::size_t bytes) const noexcept {
  const std::uint64_t begin =
      static_cast<std::uint64_t>(round & 1) * static_cast<std::uint64_t>(size_) * SyncGroup::max_record;
  // No two ranks write one cache line.
  const std::uint64_t distance = (bytes + 63) / 64 * 64;
  return mapping_.data() + records_offset(size_) + begin + static_cast<std::uint64_t>(rank) * distance;
}

std::byte* ControlBlock::ring(int rank) const noexcept {
  return mapping_.data() + rings_offset(size_) + static_cast<std::uint64_t>(rank) * ring_bytes;
}

void ControlBlock::poison(const Error& cause) noexcept {
  if (!put(header().failure, cause)) return;
  os::futex_wake_all(header().round);
  for (int rank = 0; rank < size_; ++rank) {
    os::futex_wake_all(this->cell(rank).outbox.written_bell);
    os::futex_wake_all(this->cell(rank).outbox.read_bell);
  }
}

std::optional<Error> ControlBlock::failure() const {
  return get(header().failure);
}

void ControlBlock::decide(const Error& cause) noexcept {
  put(header().verdict, cause);
}

std::optional<Error> ControlBlock::verdict() const {
  return get(header().verdict);
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

}  // namespace muster::sync

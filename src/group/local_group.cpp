// SPDX-License-Identifier: Apache-2.0
#include "src/group/local_group.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "src/base/fixed_string.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/progress.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/futex.hpp"
#include "src/os/process.hpp"

namespace muster::group {
namespace {

std::shared_ptr<Peers> peers_of(const std::shared_ptr<Peers>& all, std::span<const int> members) {
  if (all->ranks->is_all(members)) return all;
  auto some = std::make_shared<Peers>();
  some->ranks = RankTable::part(all->ranks, members);
  for (const int member : members) {
    const auto at = static_cast<std::size_t>(member);
    some->pidfds.push_back(all->pidfds[at]);
    some->regions.push_back(all->regions[at]);
  }
  some->structure = all->structure;
  return some;
}

}  // namespace

auto LocalGroup::in_phase(const WaitOptions& options) {
  return PhaseScope([this](const char* words) { control_->set_phase(rank(), words); }, options.phase);
}

LocalGroup::LocalGroup(Membership membership, std::chrono::milliseconds timeout)
    : BaseGroup(membership.rank, membership.peers->ranks, membership.nonce, timeout, membership.peers),
      peers_(std::move(membership.peers)),
      control_(std::move(membership.control)),
      parent_(std::move(membership.parent)) {
  control_->set_phase(rank(), between_calls);
  begin_progress();
}

LocalGroup::~LocalGroup() {
  end_progress();
  // The copy in a forked child does not leave the group: its parent is still a member.
  if (!is_owner_process()) return;
  control_->leave(rank(), *peers_);
}

std::optional<Error> LocalGroup::do_failure() const {
  if (auto own = control_->error()) return own;
  return parent_ ? parent_->error() : std::nullopt;
}

bool LocalGroup::has_failure() const noexcept {
  return control_->has_failure() || (parent_ && parent_->has_failure());
}

void LocalGroup::progress() noexcept {
  (parent_ ? parent_ : control_)->cell(rank()).progress.fetch_add(1, std::memory_order_relaxed);
}

std::optional<int> LocalGroup::missing() const {
  const std::uint32_t mine = control_->cell(rank()).arrived.load(std::memory_order_acquire);
  for (int rank = 0; rank < size(); ++rank) {
    // Other ranks may already be in the next round.
    const std::uint32_t theirs = control_->cell(rank).arrived.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(mine - theirs) > 0) return rank;
  }
  return std::nullopt;
}

template <class Done, class Needed, class Awaited, class Sleep>
void LocalGroup::wait(const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited,
                      const Sleep& sleep) {
  Watchdog watchdog(*control_, parent_.get(), *peers_, rank(), options, timeout_of(options, *this));
  RankProgress progress;
  while (!done()) {
    const std::chrono::nanoseconds longest = while_waiting_ ? while_waiting_() : Watchdog::slice;
    watchdog.check(std::ref(done), std::ref(needed), std::ref(awaited));
    sleep(progress.step(longest));
  }
}

template <class Done, class Needed, class Awaited>
void LocalGroup::wait_on(const std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& waiting,
                         const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited) {
  if (os::spin_then_yield(done, turns_)) return;
  std::uint32_t seen = 0;
  const auto is_done = [&] {
    seen = word.load(std::memory_order_seq_cst);
    return done();
  };
  wait(options, is_done, needed, awaited, [&](std::chrono::nanoseconds longest) {
    waiting.fetch_add(1, std::memory_order_seq_cst);
    os::futex_wait(word, seen, longest);
    waiting.fetch_sub(1, std::memory_order_seq_cst);
  });
}

std::uint32_t LocalGroup::round(std::span<const std::byte> record, const WaitOptions& options) {
  const auto phase = in_phase(options);
  ControlHeader& header = control_->header();
  RankCell& mine = control_->cell(rank());
  const std::uint32_t round = ++round_;
  if (!record.empty()) std::memcpy(control_->record(round, rank(), record.size()), record.data(), record.size());
  mine.record_length[round & 1].store(static_cast<std::uint32_t>(record.size()), std::memory_order_relaxed);
  mine.arrived.store(round, std::memory_order_release);
  if (header.counted.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(size())) {
    header.counted.store(0, std::memory_order_relaxed);
    header.round.store(round, std::memory_order_seq_cst);
    if (header.waiting.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(header.round);
  } else {
    const auto complete = [&] { return header.round.load(std::memory_order_acquire) == round; };
    const auto missing = [&](int rank) {
      return control_->cell(rank).arrived.load(std::memory_order_acquire) != round;
    };
    wait_on(
        header.round, header.waiting, options, complete, [](int) { return true; }, missing);
  }
  for (int rank = 0; rank < size(); ++rank) {
    const std::uint32_t length = control_->cell(rank).record_length[round & 1].load(std::memory_order_relaxed);
    if (length != control_->cell(0).record_length[round & 1].load(std::memory_order_relaxed))
      throw different_calls(info(0), info(rank));
  }
  return round;
}

void LocalGroup::do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const std::uint32_t done = round(mine, options);
  for (int rank = 0; rank < size() && !mine.empty(); ++rank)
    std::memcpy(all.data() + static_cast<std::size_t>(rank) * mine.size(), control_->record(done, rank, mine.size()),
                mine.size());
}

Ring& LocalGroup::outgoing(int to) {
  auto ring = outgoing_.find(to);
  if (ring == outgoing_.end())
    or_fail(*this, [&] { ring = outgoing_.try_emplace(to, control_->make_ring(rank(), to)).first; });
  return ring->second;
}

Ring* LocalGroup::incoming(int from) {
  auto ring = incoming_.find(from);
  if (ring == incoming_.end()) {
    if (!control_->has_ring(from, rank())) return nullptr;
    or_fail(*this, [&] { ring = incoming_.try_emplace(from, control_->map_ring(from, rank())).first; });
  }
  return &ring->second;
}

template <class Done>
void LocalGroup::await(std::span<const int> on, const WaitOptions& options, const Done& done) {
  const RankSet awaited(on);
  const auto is_awaited = [&](int rank) { return awaited.contains(rank); };
  WakeWord& bell = control_->cell(rank()).bell;
  if (!done()) wait_on(bell.word, bell.waiting, options, done, is_awaited, is_awaited);
}

namespace {
/// Precedes each packet in its ring.
struct PacketBegin {
  std::uint64_t bytes = 0;
  PacketHead head{};
};
}  // namespace

bool LocalGroup::do_try_send(int to, const PacketHead& head, std::span<const std::byte> packet) {
  Ring& ring = outgoing(to);
  const PacketBegin begin{packet.size(), head};
  if (ring.room() < sizeof begin + packet.size()) return false;
  ring.write(std::as_bytes(std::span(&begin, 1)));
  if (!packet.empty()) ring.write(packet);
  control_->cell(to).bell.ring();
  progress();
  return true;
}

bool LocalGroup::do_try_receive(int from, const PacketPlace& place) {
  Ring* const ring = incoming(from);
  PacketBegin begin;
  if (ring == nullptr || ring->filled() < sizeof begin) return false;
  ring->peek(std::as_writable_bytes(std::span(&begin, 1)));
  if (begin.bytes > longest_packet()) fail_on_message(*this, from, begin.bytes, longest_packet());
  if (ring->filled() < sizeof begin + begin.bytes) return false;
  const std::span<std::byte> room = place(begin.head, begin.bytes);
  ring->take(sizeof begin);
  if (!room.empty()) ring->peek(room);
  ring->take(begin.bytes);
  control_->cell(from).bell.ring();
  progress();
  return true;
}

void LocalGroup::give_answer(std::span<const std::byte> answer, const WaitOptions& options) {
  const GroupLock use(*this);
  const auto phase = in_phase(options);
  ControlHeader& header = control_->header();
  if (pieces_ == 0) or_fail(*this, [&] { control_->reserve_pieces(); });
  for (std::size_t begin = 0; begin == 0 || begin < answer.size(); begin += answer_piece) {
    const auto piece = answer.subspan(begin, std::min(answer_piece, answer.size() - begin));
    const std::uint32_t number = pieces_ + 1;
    const auto is_late = [&](int other) {
      if (other == rank()) return false;
      const std::uint32_t taken = control_->cell(other).pieces_taken.load(std::memory_order_acquire);
      return static_cast<std::int32_t>(number - taken) > 2;
    };
    const auto is_free = [&] { return std::ranges::none_of(all(), is_late); };
    WakeWord& bell = control_->cell(rank()).bell;
    if (begin != 0 && !is_free()) wait_on(bell.word, bell.waiting, options, is_free, is_late, is_late);
    if (begin == 0) header.answer_bytes.store(answer.size(), std::memory_order_relaxed);
    if (!piece.empty()) std::memcpy(control_->piece(number), piece.data(), piece.size());
    pieces_ = number;
    header.pieces.ring();
    // The readers wait for this rank, and a long answer has many pieces.
    progress();
  }
}

std::vector<std::byte> LocalGroup::take_answer(int from, std::uint64_t most, const WaitOptions& options) {
  const GroupLock use(*this);
  const auto phase = in_phase(options);
  ControlHeader& header = control_->header();
  std::vector<std::byte> answer;
  std::size_t begin = 0;
  do {
    const std::uint32_t number = pieces_ + 1;
    const auto has_come = [&] {
      return static_cast<std::int32_t>(header.pieces.word.load(std::memory_order_acquire) - number) >= 0;
    };
    const auto is_giver = [&](int rank) { return rank == from; };
    if (!has_come()) wait_on(header.pieces.word, header.pieces.waiting, options, has_come, is_giver, is_giver);
    if (begin == 0) {
      const std::uint64_t bytes = header.answer_bytes.load(std::memory_order_relaxed);
      if (bytes > most) fail_on_message(*this, from, bytes, most);
      answer.resize(bytes);
    }
    const std::size_t length = std::min(answer_piece, answer.size() - begin);
    if (length != 0) std::memcpy(answer.data() + begin, control_->piece(number), length);
    begin += length;
    pieces_ = number;
    control_->cell(rank()).pieces_taken.store(number, std::memory_order_release);
    if (begin < answer.size()) control_->cell(from).bell.ring();
    progress();
  } while (begin < answer.size());
  return answer;
}

void LocalGroup::do_wait_for_packets(const std::function<bool()>& done, std::span<const int> on,
                                     const WaitOptions& options) {
  const auto phase = in_phase(options);
  await(on, options, done);
}

void LocalGroup::do_wait_until(const std::function<bool()>& done,
                               const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                               const WaitOptions& options) {
  const RankSet awaited(on);
  const auto is_awaited = [&](int rank) { return awaited.contains(rank); };
  if (!os::spin_then_yield(done, turns_)) wait(options, done, is_awaited, is_awaited, sleep);
}

std::shared_ptr<BaseGroup> LocalGroup::make_part(const SplitPart& part, Tie tie, const WaitOptions& options) {
  struct BlockRecord {
    Nonce nonce;
    std::uint64_t place;  // place of the new control block
  };
  BlockRecord mine{};  // only the first member's card is used
  std::vector<BlockRecord> cards;
  Membership membership;
  // Frees the new control block if the group is not created.
  struct GiveBack {
    std::shared_ptr<ControlBlock> block;
    ~GiveBack() {
      if (block) block->give_back();
    }
  } unless_made;
  together(options, [&] {
    cards.resize(static_cast<std::size_t>(size()));
    if (part.position != 0) return;
    os::random_bytes(mine.nonce);
    membership.control = ControlBlock::create(*peers_->structure, static_cast<int>(part.members.size()));
    unless_made.block = membership.control;
    mine.place = membership.control->place();
  });
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  std::shared_ptr<BaseGroup> copy;
  together(options, [&] {
    if (part.members.empty()) return;
    const BlockRecord& first = cards[static_cast<std::size_t>(part.members.front())];
    if (part.position != 0)
      membership.control = ControlBlock::open(*peers_->structure, first.place, static_cast<int>(part.members.size()));
    membership.nonce = first.nonce;
    membership.rank = part.position;
    membership.peers = peers_of(peers_, part.members);
    if (tie == Tie::companion) membership.parent = control_;
    copy = std::make_shared<LocalGroup>(std::move(membership), timeout());
  });
  unless_made.block = nullptr;
  return copy;
}

}  // namespace muster::group

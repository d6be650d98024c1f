// SPDX-License-Identifier: Apache-2.0
#include "src/sync/local_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "src/os/futex.hpp"
#include "src/os/pidfd.hpp"
#include "src/os/process.hpp"
#include "src/sync/settings.hpp"

namespace muster::sync {
namespace {

/// Stands before each message in a ring.

class LocalLiveness final : public PeerLiveness {
 public:
  LocalLiveness(std::shared_ptr<const Peers> peers, int rank) : peers_(std::move(peers)), rank_(rank) {}
  [[nodiscard]] bool is_dead() const noexcept override {
    return os::has_exited(peers_->pidfds[static_cast<std::size_t>(rank_)]);
  }

 private:
  std::shared_ptr<const Peers> peers_;
  int rank_;
};

void ring_bell(std::atomic<std::uint32_t>& bell, const std::atomic<std::uint32_t>& waiting) noexcept {
  bell.fetch_add(1, std::memory_order_seq_cst);
  if (waiting.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(bell);
}

/// Copies between a ring and plain bytes, around the ring's end.
template <class Copy>
void around(std::uint64_t position, std::uint64_t bytes, const Copy& copy) {
  const std::uint64_t begin = position % ring_bytes;
  const std::uint64_t first = std::min(bytes, ring_bytes - begin);
  copy(begin, std::uint64_t{0}, first);
  if (first < bytes) copy(std::uint64_t{0}, first, bytes - first);
}

}  // namespace

/// Tells the others what this rank is in, for their messages.
class LocalGroup::Phase {
 public:
  Phase(ControlBlock& control, int rank, const WaitOptions& options) : control_(control), rank_(rank) {
    control_.set_phase(rank_, options.phase);
  }
  ~Phase() { control_.set_phase(rank_, "its own work"); }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  ControlBlock& control_;
  int rank_;
};

LocalGroup::LocalGroup(Membership membership, std::chrono::milliseconds timeout)
    : SyncGroup(membership.rank, membership.peers->ranks, membership.nonce, timeout),
      peers_(std::move(membership.peers)),
      control_(std::move(membership.control)),
      parent_(std::move(membership.parent)),
      // More ranks than cores: whoever spins keeps the one it waits for from running.
      spins_(os::usable_cores() >= size() ? 4000 : 200),
      channel_(membership.rank, std::move(membership.listener), std::move(membership.addresses), membership.nonce,
               [this](const WaitOptions& options) -> LocalChannel::Patience {
                 auto watchdog = std::make_shared<Watchdog>(this->watchdog(options));
                 return [watchdog](int peer, const std::function<bool()>& done) {
                   const auto is_peer = [peer](int rank) { return rank == peer; };
                   watchdog->check(done, is_peer, is_peer);
                 };
               }) {
  control_->set_phase(rank(), "its own work");
}

LocalGroup::~LocalGroup() {
  // A forked child's copy goes silently: its parent is still in the group.
  if (!is_owner_process()) return;
  control_->cell(rank()).left.store(1, std::memory_order_release);
}

std::chrono::milliseconds LocalGroup::timeout_of(const WaitOptions& options) const {
  return sync::timeout_of(options.timeout, timeout());
}

Watchdog LocalGroup::watchdog(const WaitOptions& options) const {
  return {*control_, parent_.get(), *peers_, rank(), options, timeout_of(options)};
}

std::optional<Error> LocalGroup::failure() const {
  if (auto own = control_->failure()) return own;
  return parent_ ? parent_->failure() : std::nullopt;
}

std::shared_ptr<const PeerLiveness> LocalGroup::liveness(int rank) const {
  (void)info(rank);
  return std::make_shared<LocalLiveness>(peers_, rank);
}

void LocalGroup::progress() noexcept {
  (parent_ ? parent_ : control_)->cell(rank()).progress.fetch_add(1, std::memory_order_relaxed);
}

std::optional<int> LocalGroup::missing() const {
  const std::uint32_t mine = control_->cell(rank()).arrived.load(std::memory_order_acquire);
  for (int rank = 0; rank < size(); ++rank) {
    // Others may be in the next round already.
    const std::uint32_t theirs = control_->cell(rank).arrived.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(mine - theirs) > 0) return rank;
  }
  return std::nullopt;
}

template <class Done, class Needed, class Awaited>
void LocalGroup::wait(const std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& waiting,
                      const WaitOptions& options, const Done& done, const Needed& needed, const Awaited& awaited,
                      int reading) {
  for (int turn = 0; turn < spins_; ++turn) {
    if (done()) return;
    os::spin_pause();
  }
  Watchdog watchdog = this->watchdog(options);
  auto looked = std::chrono::steady_clock::now();
  for (;;) {
    const std::uint32_t seen = word.load(std::memory_order_seq_cst);
    if (done()) return;
    const std::chrono::nanoseconds longest = next_sleep();
    watchdog.check_failure();
    waiting.fetch_add(1, std::memory_order_seq_cst);
    const bool in_time = os::futex_wait(word, seen, longest);
    waiting.fetch_sub(1, std::memory_order_seq_cst);
    if (done()) return;
    take_aside(reading, options);
    const auto now = std::chrono::steady_clock::now();
    if (in_time || now - looked < Watchdog::slice) continue;
    watchdog.check(done, needed, awaited);
    looked = now;
  }
}

std::uint32_t LocalGroup::round(std::span<const std::byte> record, const WaitOptions& options) {
  const Phase phase(*control_, rank(), options);
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
    wait(
        header.round, header.waiting, options, complete, [](int) { return true; }, missing);
  }
  for (int rank = 0; rank < size(); ++rank) {
    const std::uint32_t length = control_->cell(rank).record_length[round & 1].load(std::memory_order_relaxed);
    if (length == record.size()) continue;
    const Error cause(ErrorKind::rank_mismatch,
                      fmt::format("in '{}' rank {} gave {} bytes and rank {} gave {}: the ranks are in different calls",
                                  options.phase, info(this->rank()).rank, record.size(), info(rank).rank, length),
                      {.rank = info(rank).rank});
    control_->poison(cause);
    throw control_->failure().value_or(cause);
  }
  return round;
}

void LocalGroup::do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all, const WaitOptions& options) {
  const std::uint32_t done = round(mine, options);
  for (int rank = 0; rank < size() && !mine.empty(); ++rank)
    std::memcpy(all.data() + static_cast<std::size_t>(rank) * mine.size(), control_->record(done, rank, mine.size()),
                mine.size());
}

void LocalGroup::write_ring(int to, std::span<const std::byte> bytes, const WaitOptions& options) {
  Outbox& outbox = control_->cell(rank()).outbox;
  std::byte* ring = control_->ring(rank());
  std::uint64_t written = outbox.written.load(std::memory_order_relaxed);
  const auto is_receiver = [to](int rank) { return rank == to; };
  while (!bytes.empty()) {
    std::uint64_t room = 0;
    const auto has_room = [&] {
      room = ring_bytes - (written - outbox.read.load(std::memory_order_acquire));
      return room != 0;
    };
    if (!has_room()) wait(outbox.read_bell, outbox.sender_waiting, options, has_room, is_receiver, is_receiver);
    const std::uint64_t piece = std::min<std::uint64_t>(room, bytes.size());
    around(written, piece, [&](std::uint64_t at, std::uint64_t from, std::uint64_t length) {
      std::memcpy(ring + at, bytes.data() + from, length);
    });
    written += piece;
    outbox.written.store(written, std::memory_order_release);
    ring_bell(outbox.written_bell, outbox.receivers_waiting);
    bytes = bytes.subspan(piece);
    progress();
  }
}

void LocalGroup::read_ring(int from, std::span<std::byte> bytes, const WaitOptions& options) {
  Outbox& outbox = control_->cell(from).outbox;
  const std::byte* ring = control_->ring(from);
  std::uint64_t read = outbox.read.load(std::memory_order_relaxed);
  const auto is_sender = [from](int rank) { return rank == from; };
  while (!bytes.empty()) {
    std::uint64_t there = 0;
    const auto has_bytes = [&] {
      there = outbox.written.load(std::memory_order_acquire) - read;
      return there != 0;
    };
    if (!has_bytes()) wait(outbox.written_bell, outbox.receivers_waiting, options, has_bytes, is_sender, is_sender);
    const std::uint64_t piece = std::min<std::uint64_t>(there, bytes.size());
    around(read, piece, [&](std::uint64_t at, std::uint64_t to, std::uint64_t length) {
      std::memcpy(bytes.data() + to, ring + at, length);
    });
    read += piece;
    outbox.read.store(read, std::memory_order_release);
    ring_bell(outbox.read_bell, outbox.sender_waiting);
    bytes = bytes.subspan(piece);
    progress();
  }
}

void LocalGroup::do_send(int to, Subject subject, std::span<const std::byte> message, const WaitOptions& options) {
  const Phase phase(*control_, rank(), options);
  const Frame frame{to, subject, message.size()};
  control_->cell(to).letters.fetch_add(1, std::memory_order_release);
  write_ring(to, std::as_bytes(std::span(&frame, 1)), options);
  write_ring(to, message, options);
}

/// The frame of a sender's next message, where that is for this rank. `ahead`: who has to take one first; -1: nobody.
std::optional<LocalGroup::Frame> LocalGroup::next_frame(int from, int& ahead) const {
  const Outbox& outbox = control_->cell(from).outbox;
  const std::uint64_t read = outbox.read.load(std::memory_order_acquire);
  ahead = -1;
  // Inside another rank's message there are no frames, whatever its bytes look like.
  if (read != outbox.next_frame.load(std::memory_order_acquire)) {
    ahead = outbox.reader.load(std::memory_order_relaxed);
    return std::nullopt;
  }
  Frame frame{};
  if (outbox.written.load(std::memory_order_acquire) - read < sizeof frame) return std::nullopt;
  around(read, sizeof frame, [&](std::uint64_t at, std::uint64_t to, std::uint64_t length) {
    std::memcpy(reinterpret_cast<std::byte*>(&frame) + to, control_->ring(from) + at, length);
  });
  // Another receiver may have moved the head meanwhile: then what was read may be a torn frame.
  if (outbox.read.load(std::memory_order_acquire) != read) return std::nullopt;
  if (frame.to == rank()) return frame;
  ahead = frame.to;
  return std::nullopt;
}

/// The message behind that frame.
std::vector<std::byte> LocalGroup::take(int from, const Frame& frame, std::uint64_t most, const WaitOptions& options) {
  Outbox& outbox = control_->cell(from).outbox;
  outbox.reader.store(rank(), std::memory_order_relaxed);
  // Before `read` leaves the frame.
  outbox.next_frame.fetch_add(sizeof frame + frame.length, std::memory_order_release);
  ++letters_taken_;
  Frame again{};
  read_ring(from, std::as_writable_bytes(std::span(&again, 1)), options);
  if (frame.length > most) {
    // What follows in the ring cannot be told from frames any more.
    const Error cause(ErrorKind::corrupt,
                      fmt::format("rank {} announces a message of {} bytes where at most {} can be", info(from).rank,
                                  frame.length, most),
                      {.rank = info(from).rank});
    control_->poison(cause);
    throw control_->failure().value_or(cause);
  }
  std::vector<std::byte> message(frame.length);
  read_ring(from, message, options);
  // The next message may be for a rank that waits for it to come to the head.
  ring_bell(outbox.written_bell, outbox.receivers_waiting);
  return message;
}

SyncGroup::Letter LocalGroup::do_receive(int from, Subject wanted, std::uint64_t most, const WaitOptions& options) {
  const Phase phase(*control_, rank(), options);
  Outbox& outbox = control_->cell(from).outbox;
  // The message at the head of the ring may be for another rank, which will take it: that one is waited for, too.
  int ahead = -1;
  std::optional<Frame> frame;
  const auto is_ours = [&] {
    frame = next_frame(from, ahead);
    return frame.has_value();
  };
  const auto is_awaited = [&](int rank) { return rank == from || rank == ahead; };
  if (!is_ours()) wait(outbox.written_bell, outbox.receivers_waiting, options, is_ours, is_awaited, is_awaited, from);
  return {frame->subject, take(from, *frame, frame->subject == wanted ? most : UINT64_MAX, options)};
}

void LocalGroup::take_aside(int reading, const WaitOptions& options) {
  // What this rank waits for has been counted, or will be.
  if (control_->cell(rank()).letters.load(std::memory_order_acquire) == letters_taken_ || takes_aside_) return;
  takes_aside_ = true;
  const std::unique_ptr<bool, void (*)(bool*)> reset(&takes_aside_, [](bool* flag) { *flag = false; });
  for (int from = 0; from < size(); ++from) {
    int ahead = -1;
    if (from == rank() || from == reading) continue;
    while (const std::optional<Frame> frame = next_frame(from, ahead))
      put_aside(from, {frame->subject, take(from, *frame, UINT64_MAX, options)});
  }
}

void LocalGroup::do_wait_until(const std::function<bool()>& done,
                               const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                               const WaitOptions& options) {
  for (int turn = 0; turn < spins_; ++turn) {
    if (done()) return;
    os::spin_pause();
  }
  Watchdog watchdog = this->watchdog(options);
  const auto is_awaited = [on](int rank) { return std::ranges::find(on, rank) != on.end(); };
  auto looked = std::chrono::steady_clock::now();
  while (!done()) {
    const std::chrono::nanoseconds longest = next_sleep();
    watchdog.check_failure();
    sleep(longest);
    const auto now = std::chrono::steady_clock::now();
    if (done() || now - looked < Watchdog::slice) continue;
    watchdog.check(done, is_awaited, is_awaited);
    looked = now;
  }
}

std::shared_ptr<SyncGroup> LocalGroup::do_duplicate(const WaitOptions& options, Tie tie) {
  // Each rank opens a channel of its own; rank 0 makes the new control block and hands it out over the old channel.
  struct Card {
    std::array<char, 64> address;
    Nonce nonce;  // rank 0's is the new group's
  };
  Membership membership;
  membership.rank = rank();
  membership.peers = peers_;
  if (tie == Tie::companion) membership.parent = control_;
  const std::string address = LocalChannel::fresh_address();
  membership.listener = os::listen_abstract(address);
  Card mine{};
  std::memcpy(mine.address.data(), address.data(), std::min(address.size(), mine.address.size() - 1));
  os::random_bytes(mine.nonce);
  std::vector<Card> cards(static_cast<std::size_t>(size()));
  do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(cards)), options);
  for (const Card& card : cards) membership.addresses.emplace_back(card.address.data());
  membership.nonce = cards.front().nonce;
  if (rank() == 0) {
    membership.control = ControlBlock::create(size());
    for (int other = 1; other < size(); ++other)
      channel_.send(other, membership.nonce, membership.control->memory().get(), options);
  } else {
    membership.control = ControlBlock::open(channel_.receive(0, options).descriptor, size());
  }
  auto copy = std::make_shared<LocalGroup>(std::move(membership), timeout());
  do_barrier(options);
  return copy;
}

}  // namespace muster::sync

// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/flows.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <thread>

#include "src/sync/failing.hpp"
#include "src/sync/settings.hpp"

namespace muster::mpi {
namespace {

using std::chrono::milliseconds;

// MPI moves all pieces that it has at once, and they end together: eight of 4 MiB take so long at 3 GB/s. Slower links
// keep busy from the kernel's buffers while this rank naps.
constexpr milliseconds eager_for{10};
// Others ask meanwhile whether this rank moves: the group has to look at its own messages, too.
constexpr milliseconds longest_look{20};
constexpr milliseconds between_looks{50};
// Buffers of a sender: one is filled while others are under way.
constexpr std::size_t most_buffers = 4;
// Long against what is under way to one receiver on most links, and short enough for the dead to be named in a second.
constexpr milliseconds longest_last_sends{250};

}  // namespace

bool Eagerness::again(bool has_moved) noexcept {
  const Clock::time_point now = Clock::now();
  if (has_moved) moved_ = now;
  if (now - moved_ > eager_for || now - entered_ > longest_look) return false;
  if (!has_moved) std::this_thread::yield();
  return true;
}

Inflow::Inflow(MpiGroup& group, const std::vector<Lane>& lanes, Sink& sink) : group_(group), sink_(sink) {
  for (const Lane& lane : lanes) {
    if (lane.pieces != 0) unfinished_.push_back(states_.size());
    states_.push_back({lane, 0, 0, 0, {}, Clock::now()});
  }
}

void Inflow::open() {
  for (const std::size_t index : unfinished_) open(index);
}

bool Inflow::open(std::size_t index) {
  State& state = states_[index];
  bool has_opened = false;
  while (state.lane.ring == nullptr && state.next < state.lane.pieces && state.open.size() < pieces_under_way) {
    const std::span<std::byte> place = sink_.place(index, state.next);
    if (place.empty()) break;
    state.open.push_back(
        start_receive(group_.comm(), state.lane.sender, group_.data_tag(), place, sink_.keeper(index)));
    if (state.open.size() == 1) state.moved = Clock::now();
    ++state.next;
    has_opened = true;
  }
  return has_opened;
}

bool Inflow::look() {
  bool has_moved = false;
  for (const std::size_t index : unfinished_) {
    State& state = states_[index];
    while (!state.open.empty() && group_.towards(state.lane.sender, [&] { return state.open.front().test(); })) {
      state.open.pop_front();
      state.moved = Clock::now();
      sink_.arrived(index, state.done++);
      group_.progress();
      has_moved = true;
    }
    const Lane& lane = state.lane;
    while (lane.ring != nullptr && state.done < lane.pieces &&
           lane.ring->is_full(lane.turn + static_cast<std::uint32_t>(state.done), 1) &&
           sink_.takes(index, state.done)) {
      state.moved = Clock::now();
      sink_.arrived(index, state.done++);
      group_.progress();
      has_moved = true;
    }
    has_moved = open(index) || has_moved;
  }
  return sink_.work() || has_moved;
}

void Inflow::run(const WaitOptions& wait) {
  sync::or_fail(group_, [&] { take_all(wait); });
}

void Inflow::take_all(const WaitOptions& wait) {
  while (!unfinished_.empty() || sink_.has_work_left()) {
    // Those of other hosts that something is awaited from. One wait until each of them has moved: a rank that stands
    // still is late, however much the others send.
    std::vector<int> on;
    std::vector<std::size_t> awaited;
    for (const std::size_t index : unfinished_) {
      if (!is_awaited(index)) continue;
      awaited.push_back(index);
      states_[index].done_before = states_[index].done;
      if (!group_.shares_memory(states_[index].lane.sender)) on.push_back(states_[index].lane.sender);
    }
    const std::size_t before = unfinished_.size();
    group_.wait_for(
        [&] {
          eagerness_.begin();
          for (;;) {
            const bool has_moved = look();
            std::erase_if(unfinished_,
                          [&](std::size_t index) { return states_[index].done == states_[index].lane.pieces; });
            if (unfinished_.size() != before || unfinished_.empty()) return true;
            if (!eagerness_.again(has_moved)) break;
          }
          look_at_neighbours(wait);
          return std::ranges::all_of(
              awaited, [&](std::size_t index) { return states_[index].done != states_[index].done_before; });
        },
        on, wait);
  }
}

/// A lane for whose next piece there is no room waits for the others.
bool Inflow::is_awaited(std::size_t index) const {
  const State& state = states_[index];
  return !state.open.empty() ||
         (state.lane.ring != nullptr && state.done < state.lane.pieces && sink_.takes(index, state.done));
}

void Inflow::look_at_neighbours(const WaitOptions& wait) {
  const Clock::time_point now = Clock::now();
  if (now - looked_ < between_looks) return;
  looked_ = now;
  for (const std::size_t index : unfinished_) {
    State& state = states_[index];
    const int sender = state.lane.sender;
    if (!group_.shares_memory(sender)) continue;
    group_.throw_if_dead(sender);
    if (!is_awaited(index)) state.moved = now;
    if (now - state.moved <= sync::timeout_of(wait.timeout, group_.timeout())) continue;
    throw error_of(
        group_.info(sender), ErrorKind::timeout,
        fmt::format("rank {} waited {:.1f} s in '{}' for a piece from {}: look what that process does, or raise the "
                    "timeout (MUSTER_TIMEOUT, seconds)",
                    group_.rank(), std::chrono::duration<double>(now - state.moved).count(), wait.phase,
                    name_of(group_.info(sender))));
  }
}

void Outflow::prepare(BufferPool& pool, std::size_t pieces, std::uint64_t bytes, std::uint64_t pool_limit) {
  buffers_.clear();
  const std::vector<std::uint64_t> sizes(std::min(pieces, most_buffers), bytes);
  if (!sizes.empty()) buffers_ = pool.take(sizes, pool_limit);
}

void Outflow::prepare(BufferPool& pool, const OutgoingTree& tree, const std::vector<Piece>& pieces,
                      std::uint64_t pool_limit) {
  std::size_t packed = 0;
  std::uint64_t largest = 0;
  for (const Piece& piece : pieces) {
    if (!tree.is_packed(piece)) continue;
    ++packed;
    largest = std::max(largest, piece.bytes);
  }
  // Two sizes in all, so that buffers serve again.
  prepare(pool, packed, largest > packed_piece ? cut_piece : packed_piece, pool_limit);
}

std::shared_ptr<std::byte> Outflow::buffer(const WaitOptions& wait) {
  for (;;) {
    // Only this one holds it: no send under way does.
    const auto unused =
        std::ranges::find_if(buffers_, [](const BufferPool::Buffer& each) { return each.data.use_count() == 1; });
    if (unused != buffers_.end()) return unused->data;
    drain(under_way_.size() - 1, wait);
  }
}

void Outflow::send(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& wait,
                   int tag) {
  drain(pieces_under_way - 1, wait);
  under_way_.push_back(group_.towards(
      to_, [&] { return start_send(group_.comm(), to_, group_.data_tag() + tag, bytes, std::move(keeper)); }));
  eagerness_.note();
}

void Outflow::send(const OutgoingTree& tree, const Piece& piece, const WaitOptions& wait) {
  if (!tree.is_packed(piece)) return send(tree.bytes_of(piece), tree.owner_of(piece), wait);
  const std::shared_ptr<std::byte> packed = buffer(wait);
  tree.pack(piece, packed.get());
  send({packed.get(), piece.bytes}, packed, wait);
}

void Outflow::finish(const WaitOptions& wait) {
  drain(0, wait);
}

void Outflow::drain(std::size_t most, const WaitOptions& wait) {
  if (under_way_.size() <= most) return;
  const std::array<int, 1> on{to_};
  try {
    waits_->wait_for(
        [&] {
          eagerness_.begin();
          for (;;) {
            bool has_moved = false;
            while (!under_way_.empty() && group_.towards(to_, [&] { return under_way_.front().test(); })) {
              under_way_.pop_front();
              group_.progress();
              has_moved = true;
            }
            if (under_way_.size() <= most) return true;
            if (!eagerness_.again(has_moved)) break;
          }
          group_.throw_if_dead(to_);
          return false;
        },
        on, wait);
  } catch (const Error& error) {
    // A receiver that lives takes in what it has been promised, if both let MPI go on: then views are the caller's
    // again.
    const auto until = Clock::now() + (error.rank() == to_ ? std::chrono::milliseconds(0) : longest_last_sends);
    for (;;) {
      std::erase_if(under_way_, [](Pending& send) { return send.is_over(); });
      if (std::ranges::none_of(under_way_, &Pending::borrows) || must_rest() || Clock::now() >= until) break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (std::ranges::none_of(under_way_, &Pending::borrows)) throw;
    throw error.with_context(
        "tensors were being sent, and MPI may still read them: leave them where they are until "
        "the process ends");
  }
}

}  // namespace muster::mpi

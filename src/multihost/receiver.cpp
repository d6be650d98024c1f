// SPDX-License-Identifier: Apache-2.0
// The root's side. The step numbers are those of stream_protocol.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "src/group/error_propagation.hpp"
#include "src/multihost/stream_protocol.hpp"

namespace muster::multihost {
namespace {

// The sleep of the attendant thread when no data moves. It is short compared with the time of a part on any link.
constexpr std::chrono::microseconds part_nap{200};

/// `sender` is the number that messages show.
[[noreturn]] void refuse(int sender) {
  throw Error(ErrorKind::corrupt, fmt::format("malformed header of a part from rank {}", sender), {.rank = sender});
}

bool is_whole(const Receiver::IncomingPart& part) {
  return part.whole == part.pieces;
}

}  // namespace

Receiver::Receiver(const gather::GatherCall& call, HostsGroup& group, const std::vector<SenderLimit>& sources,
                   Open open)
    : call_(call), group_(group), under_way_(group.context()), pool_(buffer_pool_of(group)), open_(std::move(open)) {
  for (const SenderLimit& source : sources)
    add_lane({.rank = source.rank, .most = source.most, .carrier = source.carrier});
  for (const SenderLimit& source : sources) {
    if (source.carrier == source.rank) continue;
    // A carrier without a part of its own.
    if (!lane_of_.contains(source.carrier)) add_lane({.rank = source.carrier, .has_said_bye = true});
    ++lane(source.carrier).riders_left;
  }
  if (lanes_.empty()) return;
  group_.context().add_hook(this, [this] { look(); });
}

Receiver::~Receiver() {
  if (attendant_.is_of_other_process()) return;
  group_.context().remove_hook(this);
}

bool Receiver::brings(int sender) const {
  return lane_of_.contains(sender);
}

void Receiver::add_lane(SenderLane lane) {
  lane_of_.emplace(lane.rank, lanes_.size());
  lanes_.push_back(std::move(lane));
}

template <class Done>
void Receiver::wait(HostsGroup& group, std::span<const int> on, const Done& done, const WaitOptions& options) {
  Eagerness eagerness;
  group.wait_for(
      [&] {
        eagerness.begin();
        for (;;) {
          bool has_moved = false;
          {
            const std::lock_guard lock(mutex_);
            if (failure_) std::rethrow_exception(failure_);
            step();
            has_moved = std::exchange(has_moved_, false);
            if (done()) return true;
          }
          if (has_moved) group.progress();
          if (!eagerness.again(has_moved)) return false;
        }
      },
      on, options);
}

/// A wait ends when one source has delivered enough. So a stalled source reaches the deadline, however much the others
/// send.
template <class Enough>
void Receiver::take_until(const Enough& enough, const WaitOptions& options) {
  group::or_fail(group_, [&] {
    for (;;) {
      std::vector<int> on;
      std::vector<const SenderLane*> awaited;
      const auto await = [&](const SenderLane& lane) {
        if (enough(lane)) return;
        on.push_back(lane.carrier);
        awaited.push_back(&lane);
      };
      {
        const std::lock_guard lock(mutex_);
        std::ranges::for_each(lanes_, await);
      }
      if (on.empty()) return;
      wait(
          group_, on,
          [&] { return std::ranges::any_of(awaited, [&](const SenderLane* lane) { return enough(*lane); }); }, options);
    }
  });
}

bool Receiver::take_heads(const WaitOptions& options) {
  take_until([](const SenderLane& lane) { return lane.has_said_bye; }, options);
  return !trouble_ && !is_without_;
}

void Receiver::take_pieces(std::size_t least, const WaitOptions& options) {
  take_until(
      [least](const SenderLane& lane) {
        return lane.has_said_bye && std::ranges::all_of(lane.parts, [&](const IncomingPart& part) {
                 return part.whole >= least || is_whole(part);
               });
      },
      options);
}

void Receiver::take_all(const WaitOptions& options) {
  take_pieces(SIZE_MAX, options);
  if (!trouble_) return;
  // A connection that is still being opened holds a refusal back, and the next round does not move it.
  take_until([this](const SenderLane& lane) { return group_.transport().has_left(group_.number_of(lane.carrier)); },
             options);
  std::rethrow_exception(trouble_);
}

void Receiver::look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) try_step();
}

std::vector<std::byte> Receiver::take_header(int rank, const WaitOptions& options) {
  SenderLane& from = lane(rank);
  wait(
      group_, std::span(&rank, 1),
      [&] { return trouble_ || from.parts.size() > from.headers_taken || from.has_said_bye; }, options);
  // Another thread of this process that advances the transport may be adding a part.
  const std::lock_guard lock(mutex_);
  if (trouble_) std::rethrow_exception(trouble_);
  if (from.parts.size() <= from.headers_taken)
    throw Error(ErrorKind::corrupt, fmt::format("rank {} left the stream before its end", group_.number_of(rank)),
                {.rank = group_.number_of(rank)});
  return std::move(from.parts[from.headers_taken++].header);
}

std::optional<Config> Receiver::take_part(int rank, const WaitOptions& options) {
  SenderLane& from = lane(rank);
  wait(
      group_, std::span(&rank, 1), [&] { return is_whole(from.parts.front()); }, options);
  const std::lock_guard lock(mutex_);
  IncomingPart part = std::move(from.parts.front());
  from.parts.pop_front();
  --from.headers_taken;
  if (!part.is_counted) from.released->fetch_add(1, std::memory_order_release);
  return std::move(part.config);
}

void Receiver::set_unattended(bool unattended) {
  if (lanes_.empty() || !group_.transport().is_for_all_threads()) return;
  {
    const std::lock_guard lock(mutex_);
    is_unattended_ = unattended;
  }
  if (!unattended) return;
  if (!attendant_.is_started())
    attendant_ =
        os::Thread("a stream", [this, changed = changed_](const std::stop_token& stop) { attend(stop, *changed); });
  changed_->notify_all();
}

void Receiver::attend(const std::stop_token& stop, std::condition_variable_any& changed) {
  Eagerness eagerness;
  std::unique_lock lock(mutex_);
  while (changed.wait(lock, stop, [this] { return is_unattended_; }) && !stop.stop_requested()) {
    eagerness.begin();
    const bool has_moved = try_step();
    lock.unlock();
    if (!eagerness.again(has_moved)) std::this_thread::sleep_for(part_nap);
    lock.lock();
  }
}

bool Receiver::try_step() noexcept {
  try {
    return !failure_ && step();
  } catch (...) {
    failure_ = std::current_exception();
    return false;
  }
}

bool Receiver::step() {
  bool has_moved = false;
  for (SenderLane& from : lanes_)
    has_moved = group_.towards(from.carrier, [&] { return step_lane(from); }) || has_moved;
  has_moved_ = has_moved_ || has_moved;
  return has_moved;
}

bool Receiver::step_lane(SenderLane& from) {
  bool has_moved = false;
  while (take_head(from)) has_moved = true;
  // Pieces arrive in order. The pieces of later parts wait for those of earlier parts.
  for (IncomingPart& part : from.parts) {
    while (!part.open.empty() && part.open.front().test()) {
      part.open.pop_front();
      if (part.arrived) part.arrived(part.whole);
      ++part.whole;
      has_moved = true;
    }
    open_pieces(from, part);
    if (!is_whole(part)) break;
  }
  if (from.has_told_last) return has_moved;
  if (const std::uint64_t released = from.released->load(std::memory_order_acquire); released != from.told) {
    tell(from, {.credits = released - from.told});
    from.told = released;
  }
  return has_moved;
}

void Receiver::open_pieces(const SenderLane& from, IncomingPart& part) {
  for (std::size_t next = part.whole + part.open.size(); next < part.pieces; ++next) {
    const std::span<std::byte> place = part.place(next);
    if (place.empty()) return;
    part.open.push_back(group_.transport().receive(group_.number_of(from.rank), group_.data_tag(), place, part.keeper));
  }
}

// Step 3.
bool Receiver::take_head(SenderLane& from) {
  if (from.carrier != from.rank || (from.has_said_bye && from.riders_left == 0)) return false;
  if (!from.head.is_open()) {
    const std::unique_ptr<ArrivedMessage> found =
        group_.transport().find(group_.number_of(from.rank), group_.data_tag() + head_tag);
    if (!found) return false;
    from.head_bytes = std::make_shared<std::vector<std::byte>>(found->bytes());
    from.head = found->receive(*from.head_bytes, from.head_bytes);
  }
  if (!from.head.test()) return false;
  const auto message = std::move(from.head_bytes);
  open_part(from, *message);
  return true;
}

void Receiver::open_part(SenderLane& carrier, std::span<const std::byte> message) {
  PartHead head;
  if (message.size() < sizeof head) refuse(group_.number_of(carrier.rank));
  std::memcpy(&head, message.data(), sizeof head);
  if (head.exchange != call_.number) return;
  const auto origin = lane_of_.find(head.origin);
  if (origin == lane_of_.end() || lanes_[origin->second].carrier != carrier.rank)
    refuse(group_.number_of(carrier.rank));
  SenderLane& from = lanes_[origin->second];
  if (from.has_said_bye || (!call_.is_part && head.is_last == 0)) refuse(group_.number_of(from.rank));
  if (from.rank != carrier.rank) --carrier.riders_left;
  from.has_said_bye = head.is_last != 0;
  if (head.has_part == 0) {
    is_without_ = is_without_ || !call_.is_part;
    return;
  }
  const bool asks = head.moving_bytes != 0 && head.is_inline == 0;
  if (asks && from.rank != carrier.rank) refuse(group_.number_of(from.rank));
  bool is_granted = false;
  if (!is_settling_ && !trouble_) {
    try {
      from.parts.push_back(part_of(from, head, message.subspan(sizeof head)));
      is_granted = true;
    } catch (...) {
      trouble_ = std::current_exception();
    }
  }
  if (is_granted) open_pieces(from, from.parts.back());
  if (asks && (is_granted || !call_.is_part))
    tell(from, {.grants = is_granted ? 1U : 0U, .is_last = call_.is_part ? 0U : 1U});
}

Receiver::IncomingPart Receiver::part_of(SenderLane& from, const PartHead& head, std::span<const std::byte> body) {
  const std::uint64_t behind = head.is_inline != 0 ? head.moving_bytes : 0;
  if (head.moving_bytes > from.most || head.header_bytes > body.size() ||
      head.descriptor_bytes > body.size() - head.header_bytes ||
      behind != body.size() - head.header_bytes - head.descriptor_bytes)
    refuse(group_.number_of(from.rank));
  if (open_) return open_(static_cast<std::size_t>(&from - lanes_.data()));
  IncomingPart part;
  part.header.assign(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(head.header_bytes));
  if (head.has_value == 0) return part;
  std::shared_ptr<std::byte> buffer;
  if (head.moving_bytes != 0) {
    // All buffers of a stream have the same size, so that each can be used for any part.
    buffer = pool_->take(from.most, call_.options->pool_limit);
    if (call_.is_part) buffer = with_credit(std::move(buffer), from.released);
    part.is_counted = call_.is_part;
  }
  IncomingTree tree = take_tree(group_.number_of(from.rank), body.subspan(head.header_bytes, head.descriptor_bytes),
                                head.descriptor_hash, head.moving_bytes, buffer, body.last(behind));
  part.config = std::move(tree.config);
  part.pieces = tree.pieces.size();
  part.place = [pieces = std::move(tree.pieces), data = buffer.get()](std::size_t piece) {
    return std::span(data + pieces[piece].offset, pieces[piece].bytes);
  };
  part.keeper = std::move(buffer);
  return part;
}

void Receiver::tell(SenderLane& to, const PartWord& word) {
  to.has_told_last = word.is_last != 0;
  const auto copy = std::make_shared<const PartWord>(word);
  group_.post(to.rank, group_.data_tag() + word_tag, std::as_bytes(std::span(copy.get(), 1)), copy);
}

// Step 6.
void Receiver::settle(Group& group, const WaitOptions& options) {
  HostsGroup& waits = HostsGroup::of(group);
  {
    const std::lock_guard lock(mutex_);
    failure_ = nullptr;
    is_settling_ = true;
    for (SenderLane& to : lanes_) tell(to, {.is_last = 1});
  }
  for (SenderLane& from : lanes_)
    wait(
        waits, std::span(&from.rank, 1),
        [&] {
          // As in take_all().
          return from.has_said_bye && std::ranges::all_of(from.parts, is_whole) &&
                 group_.transport().has_left(group_.number_of(from.rank));
        },
        options);
}

}  // namespace muster::multihost

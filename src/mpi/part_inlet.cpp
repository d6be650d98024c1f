// SPDX-License-Identifier: Apache-2.0
// The first rank's side of a stream by MPI; the numbers are those of part_stream.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/mpi/mpi_route.hpp"
#include "src/mpi/part_stream.hpp"

namespace muster::mpi {
namespace {

using namespace std::chrono_literals;

// Of the attendant, where nothing moves: short against a part's time on any link.
constexpr auto part_nap = 200us;

[[noreturn]] void refuse(int sender) {
  throw Error(ErrorKind::corrupt, fmt::format("the head of a part from rank {} is garbled", sender), {.rank = sender});
}

}  // namespace

MpiInlet::MpiInlet(const gather::Call& call, MpiGroup& group, std::uint64_t part_bytes)
    : group_(group), under_way_(group.family()), pool_(buffer_pool_of(group)), part_bytes_(part_bytes) {
  for (std::size_t position = 1; position < call.list.size(); ++position)
    if (goes_by_mpi(call, group, call.list[position])) senders_.emplace_back().rank = call.list[position];
  group_.family().add_hook(this, [this] {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) try_step();
  });
}

MpiInlet::~MpiInlet() {
  group_.family().remove_hook(this);
}

bool MpiInlet::brings(int sender) const {
  return std::ranges::find(senders_, sender, &Sender::rank) != senders_.end();
}

MpiInlet::Sender& MpiInlet::sender(int rank) {
  return *std::ranges::find(senders_, rank, &Sender::rank);
}

template <class Done>
void MpiInlet::wait(MpiGroup& group, int on, const Done& done, const WaitOptions& options) {
  Eagerness eagerness;
  group.wait_for(
      [&] {
        eagerness.begin();
        for (;;) {
          bool has_moved = false;
          {
            const std::lock_guard lock(mutex_);
            if (failure_) std::rethrow_exception(failure_);
            has_moved = step();
            if (done()) return true;
          }
          if (!eagerness.again(has_moved)) return false;
        }
      },
      std::span(&on, 1), options);
}

std::vector<std::byte> MpiInlet::take_header(int rank, const WaitOptions& options) {
  Sender& from = sender(rank);
  wait(
      group_, rank, [&] { return from.parts.size() > from.headers_taken || from.has_said_bye; }, options);
  // Whoever else lets MPI go on in this process may be adding a part.
  const std::lock_guard lock(mutex_);
  if (from.parts.size() <= from.headers_taken)
    throw Error(ErrorKind::corrupt, fmt::format("rank {} left the stream before its end", rank), {.rank = rank});
  return std::move(from.parts[from.headers_taken++].header);
}

std::optional<Config> MpiInlet::take_part(int rank, const WaitOptions& options) {
  Sender& from = sender(rank);
  wait(
      group_, rank, [&] { return from.parts.front().pieces.empty(); }, options);
  const std::lock_guard lock(mutex_);
  Part part = std::move(from.parts.front());
  from.parts.pop_front();
  --from.headers_taken;
  if (!part.is_counted) from.released->fetch_add(1, std::memory_order_release);
  return std::move(part.config);
}

void MpiInlet::set_unattended(bool unattended) {
  if (senders_.empty() || !group_.family().is_for_all_threads()) return;
  {
    const std::lock_guard lock(mutex_);
    is_unattended_ = unattended;
  }
  if (!unattended) return;
  if (!attendant_.joinable()) attendant_ = std::jthread([this](const std::stop_token& stop) { attend(stop); });
  changed_.notify_all();
}

void MpiInlet::attend(const std::stop_token& stop) {
  Eagerness eagerness;
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return is_unattended_; }) && !stop.stop_requested()) {
    eagerness.begin();
    const bool has_moved = try_step();
    lock.unlock();
    if (!eagerness.again(has_moved)) std::this_thread::sleep_for(part_nap);
    lock.lock();
  }
}

bool MpiInlet::try_step() noexcept {
  try {
    return !failure_ && step();
  } catch (...) {
    failure_ = std::current_exception();
    return false;
  }
}

bool MpiInlet::step() {
  std::erase_if(words_, [&](auto& word) { return group_.towards(word.first, [&] { return word.second.test(); }); });
  bool has_moved = false;
  for (Sender& from : senders_) has_moved = group_.towards(from.rank, [&] { return step_sender(from); }) || has_moved;
  return has_moved;
}

bool MpiInlet::step_sender(Sender& from) {
  bool has_moved = take_head(from);
  // Pieces come in their order; those of later parts wait for those of earlier ones.
  for (Part& part : from.parts) {
    while (!part.pieces.empty() && part.pieces.front().test()) {
      part.pieces.pop_front();
      has_moved = true;
    }
    if (!part.pieces.empty()) break;
  }
  if (is_settling_) return has_moved;
  if (const std::uint64_t released = from.released->load(std::memory_order_acquire); released != from.told) {
    tell(from.rank, {.kind = PartWord::Kind::credits, .count = released - from.told});
    from.told = released;
  }
  return has_moved;
}

// Step 3.
bool MpiInlet::take_head(Sender& from) {
  if (from.has_said_bye) return false;
  if (!from.head.is_open()) {
    Found found;
    if (!found.look(group_.comm(), from.rank, group_.data_tag() + head_tag)) return false;
    from.head_bytes = std::make_shared<std::vector<std::byte>>(found.bytes());
    from.head = found.receive(*from.head_bytes, from.head_bytes);
  }
  if (!from.head.test()) return false;
  const auto message = std::move(from.head_bytes);
  open_part(from, *message);
  return true;
}

void MpiInlet::open_part(Sender& from, std::span<const std::byte> message) {
  PartHead head;
  if (message.size() < sizeof head) refuse(from.rank);
  std::memcpy(&head, message.data(), sizeof head);
  if (head.is_bye != 0) {
    from.has_said_bye = true;
    return;
  }
  message = message.subspan(sizeof head);
  if (is_settling_) return;
  const std::uint64_t behind = head.is_inline != 0 ? head.moving_bytes : 0;
  if (head.moving_bytes > part_bytes_ || head.header_bytes > message.size() ||
      head.descriptor_bytes > message.size() - head.header_bytes ||
      behind != message.size() - head.header_bytes - head.descriptor_bytes)
    refuse(from.rank);
  Part part;
  part.header.assign(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(head.header_bytes));
  if (head.has_value != 0) {
    const auto descriptor = message.subspan(head.header_bytes, head.descriptor_bytes);
    std::shared_ptr<std::byte> buffer;
    if (head.moving_bytes != 0) {
      // One size of all, so that each serves any part.
      buffer = pool_->take(std::array{part_bytes_}, UINT64_MAX).front().data;
      buffer = with_credit(std::move(buffer), from.released);
      part.is_counted = true;
    }
    IncomingTree tree = take_tree(from.rank, descriptor, head.moving_bytes, buffer, message.last(behind));
    part.config = std::move(tree.config);
    for (const Piece& piece : tree.pieces)
      part.pieces.push_back(start_receive(group_.comm(), from.rank, group_.data_tag(),
                                          {buffer.get() + piece.offset, piece.bytes}, buffer));
    if (head.moving_bytes != 0 && behind == 0) tell(from.rank, {.kind = PartWord::Kind::grant});
  }
  from.parts.push_back(std::move(part));
}

void MpiInlet::tell(int rank, const PartWord& word) {
  words_.emplace_back(rank,
                      send_copy(group_.comm(), rank, group_.data_tag() + word_tag, std::as_bytes(std::span(&word, 1))));
}

// Step 6.
void MpiInlet::settle(SyncGroup& group, const WaitOptions& options) {
  auto& waits = dynamic_cast<MpiGroup&>(group);
  {
    const std::lock_guard lock(mutex_);
    failure_ = nullptr;
    is_settling_ = true;
    for (const Sender& from : senders_) tell(from.rank, {.kind = PartWord::Kind::last});
  }
  for (Sender& from : senders_) {
    const auto is_through = [&] {
      return from.has_said_bye && std::ranges::all_of(from.parts, [](const Part& part) { return part.pieces.empty(); });
    };
    wait(waits, from.rank, is_through, options);
  }
  if (!senders_.empty())
    wait(
        waits, senders_.front().rank, [&] { return words_.empty(); }, options);
}

}  // namespace muster::mpi

// SPDX-License-Identifier: Apache-2.0
// The sender's side. The step numbers are those of stream_protocol.hpp.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "src/group/error_propagation.hpp"
#include "src/multihost/carriers.hpp"
#include "src/multihost/stream_protocol.hpp"

namespace muster::multihost {
namespace {

using std::chrono::milliseconds;

// A transport may move all of its pieces together, so that they complete at the same time. Eight pieces of 4 MiB take
// about this time at 3 GB/s. The buffers of the kernel keep slower links busy while this rank naps.
constexpr milliseconds eager_for{10};
// Other ranks may ask whether this rank makes progress, so the group must read its messages.
constexpr milliseconds longest_look{20};
// The number of buffers for packed pieces: one is filled while the others are in flight.
constexpr std::size_t most_buffers = 4;
// Long compared with the data in flight to one receiver on most links. Short enough to name the dead rank within a
// second.
constexpr milliseconds longest_last_sends{250};
// If no rank died there is more time: if a send stays open, this process cannot use MPI any more.
constexpr milliseconds longest_last_sends_among_the_living{1000};

/// Returns how long the sends to `receiver` that are in flight may take to complete after `error`.
milliseconds longest_after(const Error& error, int receiver) {
  if (error.rank() == receiver) return milliseconds(0);
  return error.kind() == ErrorKind::peer_lost ? longest_last_sends : longest_last_sends_among_the_living;
}

}  // namespace

bool Eagerness::again(bool has_moved) noexcept {
  const Clock::time_point now = Clock::now();
  if (has_moved) moved_ = now;
  if (now - moved_ > eager_for || now - entered_ > longest_look) return false;
  if (!has_moved) std::this_thread::yield();
  return true;
}

Sender::Sender(const gather::GatherCall& call, HostsGroup& group)
    : call_(call), first_(call.first()), group_(group), waits_(&group) {}

template <class Done>
void Sender::wait(const Done& done, const WaitOptions& options) {
  waits_->wait_for(
      [&] {
        take_words();
        return done();
      },
      std::span(&first_, 1), options, asking_);
}

void Sender::take_words() {
  while (!has_last_) {
    if (!words_.is_open())
      words_ = group_.transport().receive(group_.number_of(first_), group_.data_tag() + word_tag,
                                          std::as_writable_bytes(std::span(word_.get(), 1)), word_);
    if (!group_.towards(first_, [&] { return words_.test(); })) return;
    credits_ += word_->credits;
    granted_ += word_->grants;
    has_last_ = word_->is_last != 0;
  }
}

// Step 1.
void Sender::wait_for_credit(std::size_t depth, const WaitOptions& options) {
  take_words();
  if (sent_ - credits_ < depth) return;
  wait([&] { return sent_ - credits_ < depth; }, options);
}

void Sender::offer(const Config* value, gather::ExchangeRecord& record) {
  has_value_ = value != nullptr;
  record.has_value = has_value_;
  tree_ = value == nullptr ? OutgoingTree() : OutgoingTree(*value, record);
  if (tree_.descriptor().size() > largest_piece / 2)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("config: its values without tensors take {} bytes, at most {} can be sent",
                            tree_.descriptor().size(), largest_piece / 2));
}

void Sender::send(std::span<const std::byte> header, const WaitOptions& options) {
  std::vector<MessagePiece> pieces;
  if (tree_.bytes() > most_inline_) pieces = cut(tree_.places());
  prepare(pieces);
  send_part(header, std::move(pieces), options);
  group_.progress();
}

void Sender::stage() {
  if (!call_.stage) return;
  call_.stage();
  gather::ExchangeRecord same;
  offer(call_.value, same);
}

void Sender::send_only(const WaitOptions& options, std::optional<std::uint64_t> piece_bytes) {
  std::vector<MessagePiece> pieces;
  try {
    stage();
    if (piece_bytes)
      pieces = cut_evenly(tree_.places().front(), *piece_bytes);
    else if (tree_.bytes() > most_inline_)
      pieces = cut(tree_.places());
    prepare(pieces);
  } catch (...) {
    // All ranks know the failure of the group already.
    if (!group_.error())
      group::or_fail(group_, [&] {
        send_head({}, {}, options);
        drain(0, options);
      });
    throw;
  }
  group::or_fail(group_, [&] { send_part({}, std::move(pieces), options); });
}

void Sender::pass_to(int carrier, bool has_part, const WaitOptions& options) {
  std::exception_ptr failure;
  std::vector<std::byte> message;
  if (has_part) {
    try {
      stage();
      message = head_message(head_of_part(tree_.bytes() != 0), {});
    } catch (...) {
      // The root needs a message without a part. Round 2 reports the reason.
      failure = std::current_exception();
    }
  }
  group::or_fail(group_, [&] {
    if (message.empty()) message = head_message({.origin = has_part ? group_.rank() : nothing_to_carry}, {});
    call_.group->send(carrier, message, options, group::Subject::exchange);
  });
  if (failure) std::rethrow_exception(failure);
  group_.progress();
}

void Sender::carry(std::span<const int> riders, const WaitOptions& options) {
  group::or_fail(group_, [&] {
    for (const int rider : riders) {
      const auto message = std::make_shared<std::vector<std::byte>>(
          gather::receive_of(call_, rider, sizeof(PartHead) + most_carried, options.phase));
      PartHead head;
      if (message->size() >= sizeof head) std::memcpy(&head, message->data(), sizeof head);
      if (message->size() >= sizeof head && head.origin == nothing_to_carry) continue;
      if (message->size() < sizeof head || head.origin != rider)
        throw Error(ErrorKind::corrupt, fmt::format("malformed message of rank {} to its carrier", rider),
                    {.rank = group_.number_of(rider)});
      start(*message, message, options, head_tag);
      group_.progress();
    }
    drain(0, options);
  });
}

// Step 2.
void Sender::prepare(const std::vector<MessagePiece>& pieces) {
  std::size_t packed = 0;
  std::uint64_t largest = 0;
  for (const MessagePiece& piece : pieces) {
    if (!tree_.is_packed(piece)) continue;
    ++packed;
    largest = std::max(largest, piece.bytes);
  }
  // At most two sizes, so that the pool can reuse the buffers.
  const std::uint64_t bytes = largest > packed_piece ? cut_piece : packed_piece;
  buffers_.clear();
  while (buffers_.size() < std::min(packed, most_buffers))
    buffers_.push_back(buffer_pool_of(group_)->take(bytes, call_.options->pool_limit));
}

std::vector<std::byte> Sender::head_message(PartHead head, std::span<const std::byte> header) const {
  head.exchange = call_.number;
  head.is_last = call_.is_part ? head.is_last : 1;
  const auto begin = std::as_bytes(std::span(&head, 1));
  std::vector<std::byte> front(begin.begin(), begin.end());
  front.insert(front.end(), header.begin(), header.end());
  return head.has_part != 0 ? tree_.message(front, head.is_inline != 0) : front;
}

PartHead Sender::head_of_part(bool is_inline) const noexcept {
  return {.descriptor_bytes = tree_.descriptor().size(),
          .descriptor_hash = tree_.hash(),
          .moving_bytes = tree_.bytes(),
          .has_part = 1,
          .has_value = has_value_ ? 1U : 0U,
          .is_inline = is_inline ? 1U : 0U,
          .origin = group_.rank()};
}

void Sender::send_head(PartHead head, std::span<const std::byte> header, const WaitOptions& options) {
  head.origin = group_.rank();
  head.header_bytes = header.size();
  const auto message = std::make_shared<std::vector<std::byte>>(head_message(head, header));
  start(*message, message, options, head_tag);
}

void Sender::send_part(std::span<const std::byte> header, std::vector<MessagePiece> pieces,
                       const WaitOptions& options) {
  ++sent_;
  send_head(head_of_part(pieces.empty() && tree_.bytes() != 0), header, options);
  if (!pieces.empty()) {
    // From here on the receiver grants the pieces, or refuses them in its last word.
    pieces_ = std::move(pieces);
    next_piece_ = 0;
    ++asked_;
    wait([&] { return granted_ == asked_ || (has_last_ && !call_.is_part); }, options);
    // Step 4.
    if (granted_ == asked_)
      for (; next_piece_ < pieces_.size(); ++next_piece_) send_piece(pieces_[next_piece_], options);
  }
  drain(0, options);
}

void Sender::send_piece(const MessagePiece& piece, const WaitOptions& options) {
  if (!tree_.is_packed(piece)) return start(tree_.bytes_of(piece), tree_.owner_of(piece), options);
  // Use the buffer that was filled first. When the sends before it have completed, no send holds it.
  const std::shared_ptr<std::byte> packed = buffers_[next_buffer_++ % buffers_.size()];
  constexpr long here_and_in_the_list = 2;
  while (packed.use_count() > here_and_in_the_list && !under_way_.empty()) drain(under_way_.size() - 1, options);
  tree_.pack(piece, packed.get());
  start({packed.get(), piece.bytes}, packed, options);
}

void Sender::start(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& options,
                   int tag) {
  drain(pieces_under_way - 1, options);
  under_way_.push_back(group_.towards(first_, [&] {
    return group_.transport().send(group_.number_of(first_), group_.data_tag() + tag, bytes, std::move(keeper),
                                   SendEnd::sent);
  }));
  eagerness_.note();
}

void Sender::drain(std::size_t most, const WaitOptions& options) {
  if (under_way_.size() <= most) return;
  try {
    waits_->wait_for(
        [&] {
          eagerness_.begin();
          for (;;) {
            bool has_moved = false;
            while (!under_way_.empty() && group_.towards(first_, [&] { return under_way_.front().test(); })) {
              under_way_.pop_front();
              group_.progress();
              has_moved = true;
            }
            if (under_way_.size() <= most) return true;
            if (!eagerness_.again(has_moved)) break;
          }
          group_.throw_if_dead(first_);
          return false;
        },
        std::span(&first_, 1), options, asking_);
  } catch (const Error& error) {
    // A live receiver receives all granted data if both sides advance the transport. The caller can then reuse the
    // memory of its views. Otherwise MPI may read it until the process ends, and the error of the group reports that.
    const auto until = Eagerness::Clock::now() + longest_after(error, group_.number_of(first_));
    for (;;) {
      std::erase_if(under_way_, [](PendingTransfer& send) { return send.is_over(); });
      if (std::ranges::none_of(under_way_, &PendingTransfer::borrows) || group_.transport().must_rest() ||
          Eagerness::Clock::now() >= until)
        break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    throw;
  }
}

// Step 6.
void Sender::settle(Group& group, const WaitOptions& options) {
  waits_ = &HostsGroup::of(group);
  send_head({.is_last = 1}, {}, options);
  wait([&] { return has_last_; }, options);
  if (granted_ == asked_ && next_piece_ < pieces_.size()) {
    std::uint64_t longest = 0;
    for (const MessagePiece& piece : pieces_) longest = std::max(longest, piece.bytes);
    const auto zeros = std::make_shared<std::vector<std::byte>>(longest);
    for (; next_piece_ < pieces_.size(); ++next_piece_)
      start(std::span(*zeros).first(pieces_[next_piece_].bytes), zeros, options);
  }
  drain(0, options);
}

}  // namespace muster::multihost

// SPDX-License-Identifier: Apache-2.0
// The step numbers are those of connection.hpp.

#include "src/tcp/peer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "muster/error.hpp"

namespace muster::tcp {
namespace {

// The limit for a peer without errors, whose messages all wait for a receive.
constexpr std::size_t most_arrivals = 1 << 16;

constexpr std::array<std::byte, 64 << 10> zeros{};

std::shared_ptr<ReceiveOperation> take_first(std::deque<std::shared_ptr<ReceiveOperation>>& receives, int tag) {
  const auto found = std::ranges::find(receives, tag, [](const auto& receive) { return receive->tag; });
  if (found == receives.end()) return nullptr;
  std::shared_ptr<ReceiveOperation> first = std::move(*found);
  receives.erase(found);
  return first;
}

Error too_long(std::uint64_t bytes, std::uint64_t room) {
  return Error(ErrorKind::io,
               fmt::format("malformed message: it has {} bytes, but at most {} are expected", bytes, room));
}

[[noreturn]] void refuse(const char* words) {
  throw Error(ErrorKind::corrupt, words);
}

}  // namespace

std::span<const std::byte> OutgoingFrame::bytes_from(std::size_t offset) const noexcept {
  const std::span<const std::byte> rest = bytes.subspan(offset);
  return is_given_up ? std::span(zeros).first(std::min(rest.size(), zeros.size())) : rest;
}

void Peer::send(const std::shared_ptr<OutgoingFrame>& message) {
  if (!to_) to_ = shared_.connect(*this);
  const std::uint64_t bytes = message->bytes.size();
  const std::uint64_t cost = cost_of(bytes);
  // Step 1 or 2.
  const bool at_once = bytes <= most_at_once && in_window_ + cost <= window;
  if (at_once) in_window_ += cost;
  message->is_offered = !at_once;
  if (!at_once) ++offers_;
  Frame frame{.kind = at_once ? FrameKind::message : FrameKind::offer, .tag = message->tag, .bytes = bytes};
  if (!at_once || message->needs_taken) {
    frame.number = next_number_++;
    unanswered_.emplace(frame.number, message);
  }
  to_->send(frame, message);
}

bool Peer::has_nothing_to_send() const noexcept {
  return failure_ || !to_ || (offers_ == 0 && to_->is_drained());
}

void Peer::sent(Connection&, const Frame& frame, const std::shared_ptr<MessageSource>& source) {
  if (frame.kind != FrameKind::message && frame.kind != FrameKind::payload) return;
  OutgoingFrame& message = static_cast<OutgoingFrame&>(*source);
  message.is_sent = true;
  if (message.is_offered) --offers_;
  if (!message.needs_taken || message.is_taken) finish(message.progress);
}

void Peer::answered(const Frame& frame) {
  if (frame.kind == FrameKind::credit) {
    in_window_ -= std::min(in_window_, frame.bytes);
    return;
  }
  const auto found = unanswered_.find(frame.number);
  if (found == unanswered_.end()) refuse("malformed message: an answer to no request");
  const std::shared_ptr<OutgoingFrame> message = std::move(found->second);
  unanswered_.erase(found);
  message->is_taken = true;
  if (frame.kind == FrameKind::want) {
    to_->send({.kind = FrameKind::payload, .number = frame.number, .bytes = message->bytes.size()}, message);
    return;
  }
  // Step 3: the receiver does not want the offer, or has taken a message. A message that has not been sent completely
  // continues.
  if (message->is_offered) --offers_;
  if (message->is_sent || message->is_offered) finish(message->progress);
}

std::shared_ptr<ReceiveOperation> Peer::match(int tag) {
  if (auto own = take_first(posted_, tag)) return own;
  return take_first(shared_.from_anybody, tag);
}

void Peer::want(std::uint64_t number, std::uint64_t bytes, const std::shared_ptr<ReceiveOperation>& receive) {
  if (bytes > receive->place.size()) {
    give_up(receive, too_long(bytes, receive->place.size()));
    if (from_) from_->send({.kind = FrameKind::taken, .number = number}, nullptr);
    return;
  }
  wanted_.emplace(number, receive);
  from_->send({.kind = FrameKind::want, .number = number}, nullptr);
}

void Peer::took(const UnmatchedMessage& arrival) {
  if (!from_ || failure_) return;
  if (!arrival.is_offer) {
    to_return_ += cost_of(arrival.bytes);
    if (to_return_ >= window / 4)
      from_->send({.kind = FrameKind::credit, .bytes = std::exchange(to_return_, 0)}, nullptr);
  }
  if (!arrival.is_offer && arrival.number != 0)
    from_->send({.kind = FrameKind::taken, .number = arrival.number}, nullptr);
}

void Peer::receive(const std::shared_ptr<ReceiveOperation>& receive) {
  if (const auto arrival = find(receive->tag)) return this->receive(arrival, receive);
  if (failure_) return finish(receive->progress, failure_);
  posted_.push_back(receive);
}

void Peer::take_back(const std::shared_ptr<ReceiveOperation>& receive) {
  std::erase(posted_, receive);
}

std::shared_ptr<UnmatchedMessage> Peer::find(std::optional<int> tag) {
  const auto found = std::ranges::find_if(
      arrivals_, [tag](const auto& one) { return tag ? one->tag == *tag : one->tag >= multihost::first_tag; });
  if (found == arrivals_.end()) return nullptr;
  std::shared_ptr<UnmatchedMessage> oldest = std::move(*found);
  arrivals_.erase(found);
  --shared_.arrivals;
  if (!oldest->is_offer) waiting_ -= cost_of(oldest->bytes);
  return oldest;
}

void Peer::receive(const std::shared_ptr<UnmatchedMessage>& arrival, const std::shared_ptr<ReceiveOperation>& receive) {
  took(*arrival);
  if (arrival->is_offer) {
    if (failure_) return give_up(receive, *failure_);
    return want(arrival->number, arrival->bytes, receive);
  }
  if (!arrival->is_whole && failure_) return give_up(receive, *failure_);
  if (arrival->bytes > receive->place.size()) return give_up(receive, too_long(arrival->bytes, receive->place.size()));
  if (!arrival->is_whole) {
    arrival->taker = receive;
    return;
  }
  if (arrival->bytes != 0) std::memcpy(receive->place.data(), arrival->memory.get(), arrival->bytes);
  finish(receive->progress);
}

void Peer::drop(const std::shared_ptr<UnmatchedMessage>& arrival) {
  took(*arrival);
  if (arrival->is_offer) from_->send({.kind = FrameKind::taken, .number = arrival->number}, nullptr);
}

bool Peer::accept(std::unique_ptr<Connection> connection) {
  if (from_ || failure_) return false;
  from_ = std::move(connection);
  if (has_said_bye_) from_->send({.kind = FrameKind::bye}, nullptr);
  from_->read();
  return true;
}

std::span<std::byte> Peer::place_for(Connection&, const Frame& frame) {
  if (frame.kind == FrameKind::payload) {
    const auto found = wanted_.find(frame.number);
    if (found == wanted_.end()) refuse("malformed message: bytes that were not requested");
    into_ = std::move(found->second);
    wanted_.erase(found);
    if (frame.bytes > into_->place.size()) refuse("malformed message: more bytes than were offered");
    return into_->place.first(frame.bytes);
  }
  auto arrival = std::make_shared<UnmatchedMessage>(
      UnmatchedMessage{.tag = frame.tag, .number = frame.number, .bytes = frame.bytes});
  into_ = match(frame.tag);
  if (into_) took(*arrival);
  if (into_ && frame.bytes <= into_->place.size()) return into_->place.first(frame.bytes);
  arrival->memory = std::make_unique_for_overwrite<std::byte[]>(frame.bytes);
  into_arrival_ = std::move(arrival);
  const std::span<std::byte> place(into_arrival_->memory.get(), frame.bytes);
  if (into_) {
    // The data is dropped when it has arrived.
    const auto receive = std::exchange(into_, nullptr);
    give_up(receive, too_long(frame.bytes, receive->place.size()));
    return place;
  }
  waiting_ += cost_of(frame.bytes);
  if (waiting_ > window || arrivals_.size() >= most_arrivals)
    refuse("malformed message: more messages than are allowed");
  arrivals_.push_back(into_arrival_);
  ++shared_.arrivals;
  return place;
}

void Peer::arrived(Connection& connection, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::message:
    case FrameKind::payload:
      // A payload without bytes has no place yet.
      if (frame.bytes == 0) (void)place_for(connection, frame);
      if (into_) {
        finish(std::exchange(into_, nullptr)->progress);
      } else if (const auto arrival = std::exchange(into_arrival_, nullptr)) {
        arrival->is_whole = true;
        if (!arrival->taker) return;
        if (arrival->bytes != 0) std::memcpy(arrival->taker->place.data(), arrival->memory.get(), arrival->bytes);
        finish(std::exchange(arrival->taker, nullptr)->progress);
      }
      return;
    case FrameKind::offer:
      if (const auto receive = match(frame.tag)) return want(frame.number, frame.bytes, receive);
      if (arrivals_.size() >= most_arrivals) refuse("malformed message: more messages than are allowed");
      arrivals_.push_back(std::make_shared<UnmatchedMessage>(
          UnmatchedMessage{.tag = frame.tag, .number = frame.number, .bytes = frame.bytes, .is_offer = true}));
      ++shared_.arrivals;
      return;
    case FrameKind::want:
    case FrameKind::taken:
    case FrameKind::credit:
      return answered(frame);
    case FrameKind::bye:
      left_.push_back(&connection);
      return;
  }
}

bool Peer::has_left(const Connection& connection) const noexcept {
  return std::ranges::find(left_, &connection) != left_.end();
}

void Peer::ended(Connection& connection, const std::optional<Error>& failure) {
  if (!failure && has_left(connection)) return;
  // Messages that arrived earlier are read first. They may contain the reason for the end.
  if (&connection == to_.get() && from_ && from_->is_open()) from_->read();
  fail(failure.value_or(Error(ErrorKind::io, "the connection was closed")));
}

void Peer::fail(const Error& why) {
  if (failure_) return;
  failure_ = why;
  for (Connection* const connection : {to_.get(), from_.get()}) {
    if (connection == nullptr) continue;
    for (const Connection::Output& output : connection->close())
      if (output.source) finish(static_cast<OutgoingFrame&>(*output.source).progress, why);
  }
  for (const auto& [number, message] : std::exchange(unanswered_, {})) finish(message->progress, why);
  for (const auto& receive : std::exchange(posted_, {})) finish(receive->progress, why);
  // Complete messages can still be received.
  shared_.arrivals -= std::erase_if(arrivals_, [](const auto& arrival) { return !arrival->is_whole; });
  for (const auto& [number, receive] : std::exchange(wanted_, {})) give_up(receive, why);
  if (into_) give_up(std::exchange(into_, nullptr), why);
  const auto arrival = std::exchange(into_arrival_, nullptr);
  if (arrival && arrival->taker) give_up(arrival->taker, why);
  shared_.lost(*this);
}

void Peer::give_up(const std::shared_ptr<ReceiveOperation>& receive, const Error& failure) {
  // The other peers can still answer the receive, so the failure of this peer does not end it.
  if (!receive->is_from_anybody || receive->progress.is_over) return finish(receive->progress, failure);
  shared_.receive_from_anybody(receive);
}

void Peer::finish(OperationState& progress, std::optional<Error> failure) {
  if (progress.is_over) return;
  progress.is_over = true;
  progress.failure = std::move(failure);
  shared_.over.push_back(std::move(progress.keeper));
}

void Peer::say_bye() {
  if (std::exchange(has_said_bye_, true)) return;
  for (Connection* const connection : {to_.get(), from_.get()})
    if (connection != nullptr) connection->send({.kind = FrameKind::bye}, nullptr);
}

bool Peer::is_through() const noexcept {
  return std::ranges::all_of(std::array<const Connection*, 2>{to_.get(), from_.get()}, [this](const Connection* one) {
    return one == nullptr || !one->is_open() || (has_left(*one) && one->is_drained());
  });
}

void Peer::give_up_sockets() noexcept {
  for (Connection* const connection : {to_.get(), from_.get()})
    if (connection != nullptr) connection->give_up_socket();
}

void Peer::close() {
  for (Connection* const connection : {to_.get(), from_.get()})
    if (connection != nullptr) connection->close();
}

}  // namespace muster::tcp

// SPDX-License-Identifier: Apache-2.0
#include "src/rendezvous/sockets.hpp"

#include <fcntl.h>
#include <string.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::rendezvous {

void SocketLine::send(const OutgoingPointer& message) {
  if (is_broken_) return;
  outgoing_.push_back(message);
  move();
}

void SocketLine::move() {
  is_stalled_ = false;
  while (!is_broken_ && !outgoing_.empty()) {
    const OutgoingMessage& message = *outgoing_.front();
    // A message with many descriptors is sent in pieces; the descriptors of a piece accompany its first byte.
    const std::size_t pieces = message.descriptors.size() / os::most_descriptors + 1;
    const std::size_t piece_bytes = (message.bytes.size() + pieces - 1) / pieces;
    const std::size_t piece = sent_ / piece_bytes;
    std::span<const int> descriptors;
    if (sent_ % piece_bytes == 0) {
      descriptors = message.descriptors;
      descriptors = descriptors.subspan(std::min(piece * os::most_descriptors, descriptors.size()));
      descriptors = descriptors.first(std::min(os::most_descriptors, descriptors.size()));
    }
    const std::size_t until = std::min((piece + 1) * piece_bytes, message.bytes.size());
    const os::Transferred sent =
        os::send_some(socket_, std::span(message.bytes).subspan(sent_, until - sent_), descriptors);
    if (sent.status == os::SocketStatus::closed) {
      // next() reads the bytes that arrived before the end, and then reports the end.
      is_broken_ = true;
      is_readable_ = true;
      return;
    }
    if (sent.status == os::SocketStatus::again) {
      is_stalled_ = !descriptors.empty();
      return;
    }
    sent_ += sent.bytes;
    sent_bytes_ += sent.bytes;
    if (sent_ < message.bytes.size()) continue;
    sent_ = 0;
    outgoing_.pop_front();
  }
}

bool SocketLine::read(std::span<std::byte> place, std::size_t& got) {
  while (got < place.size()) {
    const os::Transferred received = os::receive_some(socket_, place.subspan(got), message_.descriptors);
    if (received.status == os::SocketStatus::done) {
      got += received.bytes;
      continue;
    }
    is_readable_ = false;
    if (received.status == os::SocketStatus::closed)
      close(errno == 0 ? "it has closed its connection"
                       : std::string("its connection was lost (") + ::strerror(errno) + ")");
    return false;
  }
  return true;
}

std::optional<Message> SocketLine::next(const MessageLimits& limits) {
  if (end_ || !is_readable_) return std::nullopt;
  if (!head_) {
    if (!read(head_bytes_, head_got_)) return std::nullopt;
    MessageHead head;
    std::memcpy(&head, head_bytes_.data(), sizeof head);
    head_ = parse_head(head, limits);
    if (!head_) {
      close("an invalid head", true);
      return std::nullopt;
    }
    message_.word = head_->word;
    message_.is_turned = head.magic != MessageHead::right_magic;
    message_.body.resize(head_->bytes);
  }
  if (!read(message_.body, body_got_)) return std::nullopt;
  if (message_.descriptors.size() != head_->descriptors) {
    close(std::to_string(message_.descriptors.size()) + " descriptors, expected " + std::to_string(head_->descriptors),
          true);
    return std::nullopt;
  }
  head_.reset();
  head_got_ = 0;
  body_got_ = 0;
  return std::exchange(message_, {});
}

void SocketLine::close(const std::string& words, bool is_garbage) {
  end_ = End{.is_garbage = is_garbage, .words = words};
  is_broken_ = is_broken_ || !is_garbage;
  message_ = {};
}

pollfd SocketLine::wanted() const noexcept {
  const int events = POLLIN | (outgoing_.empty() || is_stalled_ || is_broken_ ? 0 : POLLOUT);
  return {end_ ? -1 : socket_.get(), static_cast<short>(events), 0};
}

void SocketLine::ready(short events) noexcept {
  if ((events & ~POLLOUT) != 0) is_readable_ = true;
}

std::vector<SocketLine*> carriers_of(std::span<Line* const> lines) {
  std::vector<SocketLine*> carriers;
  for (Line* const line : lines) carriers.push_back(&static_cast<LineOnSocket*>(line)->carrier());
  std::ranges::sort(carriers);
  carriers.erase(std::unique(carriers.begin(), carriers.end()), carriers.end());
  return carriers;
}

void wait_for_sockets(std::span<SocketLine* const> sockets, std::span<const os::Fd* const> listeners,
                      milliseconds longest) {
  std::vector<pollfd> entries;
  bool is_stalled = false;
  for (SocketLine* const socket : sockets) {
    entries.push_back(socket->wanted());
    is_stalled = is_stalled || socket->is_stalled();
  }
  for (const os::Fd* const listener : listeners) entries.push_back({listener->get(), POLLIN, 0});
  os::poll_sockets(entries, is_stalled ? std::min(longest, milliseconds(1)) : longest);
  for (std::size_t i = 0; i < sockets.size(); ++i) sockets[i]->ready(entries[i].revents);
}

Token Sockets::open() {
  listeners_ = listen();
  reserve_ = os::Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return token();
}

std::unique_ptr<SocketLine> Sockets::greet(os::Fd socket, std::string from, const Hello& hello) {
  auto line = std::make_unique<SocketLine>(std::move(socket), std::move(from));
  line->send(make_message(Word::hello, std::as_bytes(std::span(&hello, 1))));
  return line;
}

std::vector<std::unique_ptr<Line>> Sockets::arrivals() {
  std::vector<std::unique_ptr<Line>> lines;
  try {
    for (const os::Fd& listener : listeners_)
      while (auto socket = os::accept_next(listener))
        if (auto line = line_of(std::move(*socket))) lines.push_back(std::move(line));
  } catch (const Error&) {
    // If some lines were accepted, the next call reports the failure.
    if (lines.empty()) throw;
  }
  return lines;
}

void Sockets::wait(std::span<Line* const> lines, milliseconds longest) {
  wait_for_sockets(carriers_of(lines), listeners(), longest);
}

std::vector<const os::Fd*> Sockets::listeners() const {
  std::vector<const os::Fd*> all;
  for (const os::Fd& listener : listeners_) all.push_back(&listener);
  return all;
}

}  // namespace muster::rendezvous

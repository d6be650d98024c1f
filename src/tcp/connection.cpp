// SPDX-License-Identifier: Apache-2.0

#include "src/tcp/connection.hpp"
#include <fmt/core.h>
#include <array>
#include <boost/asio/buffer.hpp>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>
#include "muster/error.hpp"
#include "src/multihost/transport.hpp"
#include "src/os/fd.hpp"

namespace muster::tcp {
namespace {

// The maximum number of bytes for one connection before it is the turn of the others.
constexpr std::size_t most_in_turn = 8 << 20;

/// Returns nullopt if the other side has closed the connection.
std::optional<Error> error_of(const char* operation, const error_code& failure) {
  if (failure == asio::error::eof) return std::nullopt;
  // The owner names the peer of a broken connection. A shortage of resources in this process is reported here.
  if (os::is_own_shortage(failure.value())) return os::errno_error(operation, failure.value());
  return Error(ErrorKind::io, failure.message(), {.os_error = failure.value()});
}

bool is_for_later(const error_code& failure) {
  return failure == asio::error::would_block || failure == asio::error::try_again ||
         failure == asio::error::interrupted;
}

}  // namespace

Connection::Connection(Owner& owner, Socket socket, MessageKind incoming, bool is_connected)
    : owner_(owner), socket_(std::move(socket)), incoming_(incoming), is_connected_(is_connected) {
  error_code ignored;
  socket_.non_blocking(true, ignored);
  tune(socket_.native_handle());
}

void Connection::connect(const Endpoint& endpoint, const TcpHello& hello) {
  std::memcpy(hello_.data(), &hello, sizeof hello);
  hello_left_ = sizeof hello;
  socket_.async_connect(endpoint, [this](const error_code& failure) {
    if (failure == asio::error::operation_aborted) return;
    if (failure) {
      const Error cause = *error_of("connecting", failure);
      return end(os::is_own_shortage(failure.value()) ? cause : cause.with_context("connecting to the rank"));
    }
    is_connected_ = true;
    read();
    write();
  });
}

void Connection::send(const Frame& frame, std::shared_ptr<MessageSource> source) {
  if (!is_open()) return;
  outputs_.push_back({frame, std::move(source)});
  if (is_connected_ && !waits_to_write_ && outputs_.size() == 1) write();
}

std::deque<Connection::Output> Connection::close() {
  error_code ignored;
  socket_.close(ignored);
  return std::exchange(outputs_, {});
}

void Connection::end(const std::optional<Error>& failure) {
  if (!is_open()) return;
  error_code ignored;
  socket_.close(ignored);
  owner_.ended(*this, failure);
}

void Connection::write() {
  while (is_open() && !waits_to_write_ && (hello_left_ != 0 || !outputs_.empty())) {
    std::array<asio::const_buffer, 3> parts{};
    parts[0] = asio::buffer(hello_.data() + hello_.size() - hello_left_, hello_left_);
    std::uint64_t behind = 0;
    if (!outputs_.empty()) {
      const Output& next = outputs_.front();
      behind = next.frame.bytes_behind();
      const std::size_t in_frame = std::min(written_, sizeof(Frame));
      parts[1] = asio::buffer(reinterpret_cast<const std::byte*>(&next.frame) + in_frame, sizeof(Frame) - in_frame);
      if (behind != written_ - in_frame) {
        const std::span<const std::byte> bytes = next.source->bytes_from(written_ - in_frame);
        parts[2] = asio::buffer(bytes.data(), bytes.size());
      }
    }
    error_code failure;
    std::size_t sent = socket_.write_some(parts, failure);
    if (is_for_later(failure)) {
      waits_to_write_ = true;
      socket_.async_wait(Socket::wait_write, [this](const error_code& why) {
        waits_to_write_ = false;
        if (!why) write();
      });
      return;
    }
    if (failure) return end(error_of("sending", failure));
    const std::size_t of_hello = std::min(sent, hello_left_);
    hello_left_ -= of_hello;
    sent -= of_hello;
    written_ += sent;
    if (outputs_.empty() || written_ < sizeof(Frame) + behind) continue;
    written_ = 0;
    const Output done = std::move(outputs_.front());
    outputs_.pop_front();
    owner_.sent(*this, done.frame, done.source);
  }
}

void Connection::read() {
  std::size_t in_turn = 0;
  while (is_open()) {
    const bool is_behind = !place_.empty();
    const std::span<std::byte> target = is_behind ? place_.subspan(read_) : std::span<std::byte>(head_).subspan(read_);
    error_code failure;
    const std::size_t got =
        in_turn < most_in_turn ? socket_.read_some(asio::buffer(target.data(), target.size()), failure) : 0;
    if (is_for_later(failure) || (got == 0 && !failure)) {
      socket_.async_wait(Socket::wait_read, [this](const error_code& why) {
        if (!why) read();
      });
      return;
    }
    if (failure) return end(error_of("receiving", failure));
    in_turn += got;
    if (!take(got)) return;
  }
}

bool Connection::take(std::size_t bytes) {
  read_ += bytes;
  try {
    if (place_.empty()) {
      if (read_ < head_.size()) return true;
      frame_ = parse_frame(head_, incoming_);
      read_ = 0;
      if (frame_.bytes_behind() != 0) place_ = owner_.place_for(*this, frame_);
      if (!place_.empty()) return true;
    }
    if (read_ < place_.size()) return true;
    read_ = 0;
    place_ = {};
    owner_.arrived(*this, frame_);
    return true;
  } catch (const Error& error) {
    end(error);
  } catch (const std::bad_alloc&) {
    end(os::errno_error("receiving", ENOMEM));
  }
  return false;
}

namespace {

/// Returns the maximum of the frame's `bytes`, or nullopt if a frame of this kind cannot have this direction.
std::optional<std::uint64_t> most_bytes(FrameKind kind, MessageKind way) noexcept {
  const bool is_forwards = way == MessageKind::forwards;
  switch (kind) {
    case FrameKind::message:
      return is_forwards ? std::optional(most_at_once) : std::nullopt;
    case FrameKind::offer:
    case FrameKind::payload:
      return is_forwards ? std::optional<std::uint64_t>(multihost::largest_piece) : std::nullopt;
    case FrameKind::want:
    case FrameKind::taken:
      return is_forwards ? std::nullopt : std::optional<std::uint64_t>(0);
    case FrameKind::credit:
      return is_forwards ? std::nullopt : std::optional(window);
    case FrameKind::bye:
      return 0;
  }
  return std::nullopt;
}

bool needs_number(FrameKind kind) noexcept {
  return kind == FrameKind::offer || kind == FrameKind::payload || kind == FrameKind::want || kind == FrameKind::taken;
}

}  // namespace

std::optional<int> parse_hello(std::span<const std::byte> bytes, const Token& token, int self, int size) noexcept {
  TcpHello hello;
  if (bytes.size() != sizeof hello) return std::nullopt;
  std::memcpy(&hello, bytes.data(), sizeof hello);
  const bool is_rank = hello.from >= 0 && hello.from < size && hello.from != self && hello.to == self;
  if (hello.magic != TcpHello::right_magic || hello.token != token || !is_rank) return std::nullopt;
  return hello.from;
}

Frame parse_frame(std::span<const std::byte, sizeof(Frame)> bytes, MessageKind way) {
  Frame frame;
  std::memcpy(&frame, bytes.data(), sizeof frame);
  const auto most = most_bytes(frame.kind, way);
  if (!most || frame.bytes > *most || frame.tag < 0 || (needs_number(frame.kind) && frame.number == 0))
    throw Error(ErrorKind::corrupt,
                fmt::format("malformed frame (kind {}, tag {}, number {}, {} bytes)",
                            static_cast<std::uint32_t>(frame.kind), frame.tag, frame.number, frame.bytes));
  return frame;
}

}  // namespace muster::tcp

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Implements Line and Transport over connected stream sockets, Unix or TCP.

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"
#include "src/os/socket.hpp"
#include "src/rendezvous/session.hpp"

namespace muster::rendezvous {

class SocketLine final : public Line {
 public:
  /// `from` and `address` are the results of the functions with these names.
  SocketLine(os::Fd socket, std::string from, std::array<std::uint8_t, 16> address = {})
      : socket_(std::move(socket)), from_(std::move(from)), address_(address) {}

  void send(const OutgoingPointer& message) override;
  void move() override;
  [[nodiscard]] bool is_drained() const override { return outgoing_.empty(); }
  /// The other side closes the connection after it has read a failure.
  [[nodiscard]] bool is_over() const override { return end_.has_value(); }
  std::optional<Message> next(const MessageLimits& limits) override;
  [[nodiscard]] std::optional<End> end() const override { return end_; }
  [[nodiscard]] std::array<std::uint8_t, 16> address() const override { return address_; }
  [[nodiscard]] std::string from() const override { return from_; }

  /// Used by Sockets::wait().
  [[nodiscard]] pollfd wanted() const noexcept;
  void ready(short events) noexcept;
  [[nodiscard]] bool is_stalled() const noexcept { return is_stalled_; }

 private:
  /// Reads until `place` is full. Returns false if no more bytes can be read now.
  bool read(std::span<std::byte> place, std::size_t& got);
  void close(const std::string& words, bool is_garbage = false);

  os::Fd socket_;
  std::string from_;
  std::array<std::uint8_t, 16> address_;
  std::optional<End> end_;
  std::deque<OutgoingPointer> outgoing_;
  std::size_t sent_ = 0;     // bytes of outgoing_.front() that were sent
  bool is_readable_ = true;  // the socket may have bytes to read
  bool is_broken_ = false;   // no more bytes can be sent
  bool is_stalled_ = false;  // the kernel accepts bytes, but no more descriptors
  std::array<std::byte, sizeof(MessageHead)> head_bytes_{};
  std::optional<MessageHead> head_;
  std::size_t head_got_ = 0;
  std::size_t body_got_ = 0;
  Message message_;
};

/// Implements rank 0's listening socket, and the waits of all ranks.
class Sockets : public Connector {
 public:
  Token open() final;
  std::vector<std::unique_ptr<Line>> arrivals() final;
  void give_up() noexcept final { reserve_.reset(); }
  void wait(std::span<Line* const> lines, milliseconds longest) final;

 protected:
  /// Opens the listening socket. Throws Error(io | argument).
  virtual os::Fd listen() = 0;
  [[nodiscard]] virtual Token token() const = 0;
  /// Returns the line of a connection to rank 0, and sends the Hello over it.
  static std::unique_ptr<Line> greet(os::Fd socket, std::string from, const Hello& hello);
  /// Returns the line of an accepted connection, or null to close the connection.
  virtual std::unique_ptr<SocketLine> line_of(os::Fd socket) = 0;

 private:
  os::Fd listener_;
  os::Fd reserve_;  // a spare descriptor: give_up() frees it, so that one more connection can be accepted
};

}  // namespace muster::rendezvous

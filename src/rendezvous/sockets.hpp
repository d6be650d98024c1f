// SPDX-License-Identifier: Apache-2.0
#pragma once
// Implements Line and Connector over connected stream sockets, Unix or TCP.

#include <array>
#include <cstdint>
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

class SocketLine;

/// A line whose bytes a socket carries. Several lines may share one.
class LineOnSocket : public Line {
 public:
  [[nodiscard]] virtual SocketLine& carrier() noexcept = 0;
};

class SocketLine final : public LineOnSocket {
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

  [[nodiscard]] SocketLine& carrier() noexcept override { return *this; }

  /// Returns how many bytes the kernel has accepted so far.
  [[nodiscard]] std::uint64_t sent_bytes() const noexcept { return sent_bytes_; }
  /// Used by wait_for_sockets().
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
  std::size_t sent_ = 0;  // bytes of outgoing_.front() that were sent
  std::uint64_t sent_bytes_ = 0;
  bool is_readable_ = true;  // the socket may have bytes to read
  bool is_broken_ = false;   // no more bytes can be sent
  bool is_stalled_ = false;  // the kernel accepts bytes, but no more descriptors
  std::array<std::byte, sizeof(MessageHead)> head_bytes_{};
  std::optional<MessageHead> head_;
  std::size_t head_got_ = 0;
  std::size_t body_got_ = 0;
  Message message_;
};

/// Returns the sockets that carry these lines, each of them once.
std::vector<SocketLine*> carriers_of(std::span<Line* const> lines);
/// Waits at most `longest`, until one of the sockets is ready or a listening socket has a connection.
void wait_for_sockets(std::span<SocketLine* const> sockets, std::span<const os::Fd* const> listeners,
                      milliseconds longest);

/// Implements rank 0's listening sockets, and the waits of all ranks.
class Sockets : public Connector {
 public:
  Token open() final;
  std::vector<std::unique_ptr<Line>> arrivals() override;
  void give_up() noexcept final { reserve_.reset(); }
  void wait(std::span<Line* const> lines, milliseconds longest) override;

 protected:
  /// Opens the listening sockets. Throws Error(io | argument).
  virtual std::vector<os::Fd> listen() = 0;
  [[nodiscard]] virtual Token token() const = 0;
  /// Returns the line of a connection to rank 0, and sends the Hello over it.
  static std::unique_ptr<SocketLine> greet(os::Fd socket, std::string from, const Hello& hello);
  /// Returns the line of an accepted connection, or null to close the connection.
  virtual std::unique_ptr<Line> line_of(os::Fd socket) = 0;
  [[nodiscard]] std::vector<const os::Fd*> listeners() const;

 private:
  std::vector<os::Fd> listeners_;
  os::Fd reserve_;  // a spare descriptor: give_up() frees it, so that one more connection can be accepted
};

}  // namespace muster::rendezvous

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines over connected stream sockets, Unix or TCP.

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
  /// `from` and `address` as Line has them.
  SocketLine(os::Fd socket, std::string from, std::array<std::uint8_t, 16> address = {})
      : socket_(std::move(socket)), from_(std::move(from)), address_(address) {}

  void send(const OutgoingPointer& message) override;
  void move() override;
  [[nodiscard]] bool is_drained() const override { return outgoing_.empty(); }
  /// The other side closes when it has read a failure.
  [[nodiscard]] bool is_over() const override { return end_.has_value(); }
  std::optional<Message> next(const Limits& limits) override;
  [[nodiscard]] std::optional<End> end() const override { return end_; }
  [[nodiscard]] std::array<std::uint8_t, 16> address() const override { return address_; }
  [[nodiscard]] std::string from() const override { return from_; }

  /// For Sockets::wait().
  [[nodiscard]] pollfd wanted() const noexcept;
  void ready(short events) noexcept;
  [[nodiscard]] bool is_stalled() const noexcept { return is_stalled_; }

 private:
  /// False: nothing more can be read now.
  bool read(std::span<std::byte> place, std::size_t& got);
  void close(const std::string& words, bool is_garbage = false);

  os::Fd socket_;
  std::string from_;
  std::array<std::uint8_t, 16> address_;
  std::optional<End> end_;
  std::deque<OutgoingPointer> outgoing_;
  std::size_t sent_ = 0;     // bytes of the first
  bool is_readable_ = true;  // as far as is known
  bool is_broken_ = false;   // nothing more can be sent
  bool is_stalled_ = false;  // the kernel takes no more descriptors, although there is room for bytes
  std::array<std::byte, sizeof(Head)> head_bytes_{};
  std::optional<Head> head_;
  std::size_t head_got_ = 0;
  std::size_t body_got_ = 0;
  Message message_;
};

/// Rank 0's listening socket, and the waits.
class Sockets : public Transport {
 public:
  Token open() final;
  std::vector<std::unique_ptr<Line>> arrivals() final;
  void give_up() noexcept final { reserve_.reset(); }
  void wait(std::span<Line* const> lines, milliseconds longest) final;

 protected:
  /// Opens the place. Throws Error(io | argument).
  virtual os::Fd listen() = 0;
  [[nodiscard]] virtual Token token() const = 0;
  /// A connection to rank 0, over which the hello is sent.
  static std::unique_ptr<Line> greet(os::Fd socket, std::string from, const Hello& hello);
  /// The line of a connection; null turns it away.
  virtual std::unique_ptr<SocketLine> line_of(os::Fd socket) = 0;

 private:
  os::Fd listener_;
  os::Fd reserve_;  // for a last arrival if this process runs out of descriptors
};

}  // namespace muster::rendezvous

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Connection: sends and receives frames and their payloads over one socket. Bytes are read from and written to the
// memory of the user, without a copy in between. No call waits: if the kernel does not accept or have more bytes, the
// transfer continues when the event loop is polled.

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <span>

#include "muster/error.hpp"
#include "src/tcp/frames.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::tcp {

/// The bytes of an outgoing message. Their memory may be withdrawn.
class Source {
 public:
  virtual ~Source() = default;
  Source& operator=(Source&&) = delete;
  /// Returns at least one of the bytes from `offset` on.
  [[nodiscard]] virtual std::span<const std::byte> bytes_from(std::size_t offset) const noexcept = 0;
};

class Connection {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Returns the destination of the payload of a frame, whose size must match. Not called again before arrived().
    /// Throws Error(corrupt) for an invalid frame.
    virtual std::span<std::byte> place_for(Connection& connection, const Frame& frame) = 0;
    virtual void arrived(Connection& connection, const Frame& frame) = 0;
    /// Called when the kernel has accepted the frame and its payload.
    virtual void sent(Connection& connection, const Frame& frame, const std::shared_ptr<Source>& source) = 0;
    /// Called when the connection has ended. `failure` is nullopt if the other side has closed it.
    virtual void ended(Connection& connection, const std::optional<Error>& failure) = 0;
  };

  /// If `is_connected` is false, `socket` is not connected yet, and the caller must call connect().
  /// Received frames have the direction `incoming`.
  Connection(Owner& owner, Socket socket, Way incoming, bool is_connected);
  Connection& operator=(Connection&&) = delete;

  /// Connects, and sends the handshake.
  void connect(const Endpoint& endpoint, const Hello& hello);
  /// Sends a frame. Its payload is read from `source`, which is null for a frame without payload.
  void send(const Frame& frame, std::shared_ptr<Source> source);
  /// Reads the data that has arrived, and continues to read later data.
  void read();
  /// Returns whether the kernel has accepted everything that was to be sent.
  [[nodiscard]] bool is_drained() const noexcept { return outputs_.empty(); }
  [[nodiscard]] bool is_open() const noexcept { return socket_.is_open(); }
  [[nodiscard]] Way incoming() const noexcept { return incoming_; }
  struct Output {
    Frame frame;
    std::shared_ptr<Source> source;
  };
  /// Called in a forked child.
  void give_up_socket() noexcept { give_up(socket_.is_open() ? socket_.native_handle() : -1); }
  /// Closes the connection without a call of Owner::ended. Returns the frames that have not been sent.
  std::deque<Output> close();

 private:
  void write();
  /// Returns whether the connection is still open.
  bool take(std::size_t bytes);
  void end(const std::optional<Error>& failure);

  Owner& owner_;
  Socket socket_;
  const Way incoming_;
  bool is_connected_;
  std::array<std::byte, sizeof(Hello)> hello_{};
  std::size_t hello_left_ = 0;
  std::deque<Output> outputs_;
  std::size_t written_ = 0;  // bytes of the first output, including its frame
  bool waits_to_write_ = false;
  std::array<std::byte, sizeof(Frame)> head_{};
  Frame frame_;
  std::span<std::byte> place_;
  std::size_t read_ = 0;  // bytes of the frame, then of its payload
};

}  // namespace muster::tcp

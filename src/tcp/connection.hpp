// SPDX-License-Identifier: Apache-2.0
#pragma once
// Connection: frames and their bytes over one socket, in both directions. Bytes go from where they are and come to
// where their receiver wants them, with no copy between. Nothing waits: what the kernel does not take or has not got
// yet goes on when its event loop is polled.

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

/// The bytes of a message on their way out, whose memory may be taken back.
class Source {
 public:
  virtual ~Source() = default;
  Source& operator=(Source&&) = delete;
  /// At least one of those from `offset` on.
  [[nodiscard]] virtual std::span<const std::byte> bytes_from(std::size_t offset) const noexcept = 0;
};

class Connection {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Where the bytes behind a frame go, as many as there are; not called again before they have come (arrived()).
    /// Throws Error(corrupt) on a frame that cannot be.
    virtual std::span<std::byte> place_for(Connection& connection, const Frame& frame) = 0;
    virtual void arrived(Connection& connection, const Frame& frame) = 0;
    /// The kernel has the frame and what is behind it.
    virtual void sent(Connection& connection, const Frame& frame, const std::shared_ptr<Source>& source) = 0;
    /// Nothing more comes or goes. `failure`: nullopt if the other side has closed the connection.
    virtual void ended(Connection& connection, const std::optional<Error>& failure) = 0;
  };

  /// Of a socket that is connected, or (`is_connected` false) will be: then connect() follows. Frames that come go
  /// `incoming`.
  Connection(Owner& owner, Socket socket, Way incoming, bool is_connected);
  Connection& operator=(Connection&&) = delete;

  /// Connects, and says hello.
  void connect(const Endpoint& endpoint, const Hello& hello);
  /// What is behind the frame is taken from `source`; null if nothing is.
  void send(const Frame& frame, std::shared_ptr<Source> source);
  /// Reads what has come, and from then on what comes.
  void read();
  /// All that was to be sent is with the kernel.
  [[nodiscard]] bool is_drained() const noexcept { return outputs_.empty(); }
  [[nodiscard]] bool is_open() const noexcept { return socket_.is_open(); }
  [[nodiscard]] Way incoming() const noexcept { return incoming_; }
  struct Output {
    Frame frame;
    std::shared_ptr<Source> source;
  };
  /// In a forked child.
  void give_up_socket() noexcept { give_up(socket_.is_open() ? socket_.native_handle() : -1); }
  /// The owner hears nothing of it. Returns what was to be sent.
  std::deque<Output> close();

 private:
  void write();
  /// Whether it goes on.
  bool take(std::size_t bytes);
  void end(const std::optional<Error>& failure);

  Owner& owner_;
  Socket socket_;
  const Way incoming_;
  bool is_connected_;
  std::array<std::byte, sizeof(Hello)> hello_{};
  std::size_t hello_left_ = 0;
  std::deque<Output> outputs_;
  std::size_t written_ = 0;  // of the first, its frame included
  bool waits_to_write_ = false;
  std::array<std::byte, sizeof(Frame)> head_{};
  Frame frame_;
  std::span<std::byte> place_;
  std::size_t read_ = 0;  // of the frame, then of what is behind it
};

}  // namespace muster::tcp

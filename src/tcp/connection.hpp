// SPDX-License-Identifier: Apache-2.0
#pragma once
// Connection: sends and receives frames and their payloads over one socket. Bytes are read from and written to the
// memory of the user, without a copy in between. No call waits: if the kernel does not accept or have more bytes, the
// transfer continues when the event loop is polled.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include "muster/error.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::tcp {

// The protocol on a connection. A rank that has a message for another rank connects to it and sends a Hello. From then
// on its messages are sent forwards on this connection, and the answers of the receiver are sent backwards:
//
//  1. A short message is sent eagerly: a frame and its bytes. When the receiver begins to receive the message, it
//     returns the space in the window (credit). So the unreceived messages never use more than `window` bytes.
//  2. A longer message, or one that does not fit the window, is offered. The receiver requests it when it has a buffer
//     (want). Then the bytes are sent as payload.
//  3. If the sender needs a confirmation, it numbers the message. The receiver answers with the number (taken). It also
//     does so for an offer that it does not want.
//  4. A rank that leaves in order sends `bye` on all of its connections, in both directions. If a connection ends
//     without it, the rank at the other end is lost.
//
// The rendezvous ensures that all ranks of a job have the same byte order, so frames are sent as they are in memory.

/// A secret that only the ranks of one job know.
using Token = std::array<std::byte, 16>;

struct TcpHello {
  static constexpr std::uint64_t right_magic = 0x3130'7063'7473'756d;  // "mustcp01"
  std::uint64_t magic = right_magic;
  std::int32_t from = 0;
  std::int32_t to = 0;
  Token token{};
};
static_assert(sizeof(TcpHello) == 32);

/// Returns the rank that sent this Hello to rank `self` of `size` ranks in the job of `token`. Returns nullopt for any
/// other bytes. The input may be any bytes.
std::optional<int> parse_hello(std::span<const std::byte> bytes, const Token& token, int self, int size) noexcept;

enum class FrameKind : std::uint32_t {
  message = 1,  ///< forwards; `bytes` bytes follow. If the number is not 0, the receiver answers with `taken`
  offer = 2,    ///< forwards; `bytes` bytes are available
  payload = 3,  ///< forwards; the `bytes` bytes of an offer follow
  want = 4,     ///< backwards; requests the bytes of an offer
  taken = 5,    ///< backwards
  credit = 6,   ///< backwards; returns this many bytes of the window
  bye = 7,      ///< in both directions
};

struct Frame {
  FrameKind kind = FrameKind::bye;
  std::int32_t tag = 0;
  std::uint64_t number = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] std::uint64_t bytes_behind() const noexcept {
    return kind == FrameKind::message || kind == FrameKind::payload ? bytes : 0;
  }
};
static_assert(sizeof(Frame) == 24);

/// The size of the longest message that is sent eagerly.
inline constexpr std::uint64_t most_at_once = 64 << 10;
/// The maximum cost of the messages of one rank that another rank has not begun to receive.
inline constexpr std::uint64_t window = 512 << 10;
/// Returns the cost of a message. Even an empty message has a cost, because the receiver must remember it.
constexpr std::uint64_t cost_of(std::uint64_t bytes) noexcept {
  return std::max<std::uint64_t>(bytes, 256);
}

enum class MessageKind : std::uint8_t { forwards, backwards };

/// Throws Error(corrupt) for bytes that no rank sends. The input may be any bytes.
Frame parse_frame(std::span<const std::byte, sizeof(Frame)> bytes, MessageKind way);

/// The bytes of an outgoing message. Their memory may be withdrawn.
class MessageSource {
 public:
  virtual ~MessageSource() = default;
  MessageSource& operator=(MessageSource&&) = delete;
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
    virtual void sent(Connection& connection, const Frame& frame, const std::shared_ptr<MessageSource>& source) = 0;
    /// Called when the connection has ended. `failure` is nullopt if the other side has closed it.
    virtual void ended(Connection& connection, const std::optional<Error>& failure) = 0;
  };

  /// If `is_connected` is false, `socket` is not connected yet, and the caller must call connect().
  /// Received frames have the direction `incoming`.
  Connection(Owner& owner, Socket socket, MessageKind incoming, bool is_connected);
  Connection& operator=(Connection&&) = delete;

  /// Connects, and sends the handshake.
  void connect(const Endpoint& endpoint, const TcpHello& hello);
  /// Sends a frame. Its payload is read from `source`, which is null for a frame without payload.
  void send(const Frame& frame, std::shared_ptr<MessageSource> source);
  /// Reads the data that has arrived, and continues to read later data.
  void read();
  /// Returns whether the kernel has accepted everything that was to be sent.
  [[nodiscard]] bool is_drained() const noexcept { return outputs_.empty(); }
  [[nodiscard]] bool is_open() const noexcept { return socket_.is_open(); }
  [[nodiscard]] MessageKind incoming() const noexcept { return incoming_; }
  struct Output {
    Frame frame;
    std::shared_ptr<MessageSource> source;
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
  const MessageKind incoming_;
  bool is_connected_;
  std::array<std::byte, sizeof(TcpHello)> hello_{};
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

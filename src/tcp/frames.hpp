// SPDX-License-Identifier: Apache-2.0
#pragma once
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

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace muster::tcp {

/// A secret that only the ranks of one job know.
using Token = std::array<std::byte, 16>;

struct Hello {
  static constexpr std::uint64_t right_magic = 0x3130'7063'7473'756d;  // "mustcp01"
  std::uint64_t magic = right_magic;
  std::int32_t from = 0;
  std::int32_t to = 0;
  Token token{};
};
static_assert(sizeof(Hello) == 32);

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

enum class Way : std::uint8_t { forwards, backwards };

/// Throws Error(corrupt) for bytes that no rank sends. The input may be any bytes.
Frame parse_frame(std::span<const std::byte, sizeof(Frame)> bytes, Way way);

}  // namespace muster::tcp

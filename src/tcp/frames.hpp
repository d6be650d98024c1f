// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks say on a connection. Whoever has something for another rank connects to it and says hello; from then on
// messages go forwards on this connection, and what the receiver answers goes backwards:
//
//  1. A short message goes at once: a frame, and its bytes. The receiver gives back the room that those have taken up
//     there when it has begun to take them in (credit), so that what waits there is never more than `window`.
//  2. What is longer, or finds no room, is offered. The receiver asks for it when it has a place for it (want). Then
//     its bytes go as payload.
//  3. Who has to know that a message is taken numbers it, and is answered by its number (taken). An offer that nobody
//     wants is answered so, too.
//  4. Who goes in order says bye on all of its connections, in either direction. A connection that ends without it is
//     the loss of the rank at its other end.
//
// Ranks of one job have the same byte order (the meeting sees to that), so frames are as they lie in memory.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace muster::tcp {

/// What the ranks of a job know, and nobody else.
using Token = std::array<std::byte, 16>;

struct Hello {
  static constexpr std::uint64_t right_magic = 0x3130'7063'7473'756d;  // "mustcp01"
  std::uint64_t magic = right_magic;
  std::int32_t from = 0;
  std::int32_t to = 0;
  Token token{};
};
static_assert(sizeof(Hello) == 32);

/// The rank that says hello to `self` of `size` ranks of the job of `token`; none of what anybody else says. Any bytes.
std::optional<int> parse_hello(std::span<const std::byte> bytes, const Token& token, int self, int size) noexcept;

enum class FrameKind : std::uint32_t {
  message = 1,  ///< forwards; `bytes` follow. A number other than 0: to be answered by `taken`
  offer = 2,    ///< forwards; `bytes` that can be had
  payload = 3,  ///< forwards; `bytes` of an offer follow
  want = 4,     ///< backwards: the bytes of an offer
  taken = 5,    ///< backwards
  credit = 6,   ///< backwards: so much of the window
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

/// The longest message that goes at once.
inline constexpr std::uint64_t most_at_once = 64 << 10;
/// What messages of one rank may take up at another before that has begun to take them in.
inline constexpr std::uint64_t window = 512 << 10;
/// What a message takes up: no message is free, because it has to be remembered.
constexpr std::uint64_t cost_of(std::uint64_t bytes) noexcept {
  return std::max<std::uint64_t>(bytes, 256);
}

enum class Way : std::uint8_t { forwards, backwards };

/// Throws Error(corrupt) on what no rank says. Any bytes, as many as a frame has.
Frame parse_frame(std::span<const std::byte, sizeof(Frame)> bytes, Way way);

}  // namespace muster::tcp

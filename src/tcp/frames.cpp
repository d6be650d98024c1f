// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/frames.hpp"

#include <fmt/core.h>

#include <cstring>

#include "muster/error.hpp"
#include "src/hosts/transport.hpp"

namespace muster::tcp {
namespace {

/// Returns the maximum of the frame's `bytes`, or nullopt if a frame of this kind cannot have this direction.
std::optional<std::uint64_t> most_bytes(FrameKind kind, Way way) noexcept {
  const bool is_forwards = way == Way::forwards;
  switch (kind) {
    case FrameKind::message:
      return is_forwards ? std::optional(most_at_once) : std::nullopt;
    case FrameKind::offer:
    case FrameKind::payload:
      return is_forwards ? std::optional<std::uint64_t>(hosts::largest_piece) : std::nullopt;
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
  Hello hello;
  if (bytes.size() != sizeof hello) return std::nullopt;
  std::memcpy(&hello, bytes.data(), sizeof hello);
  const bool is_rank = hello.from >= 0 && hello.from < size && hello.from != self && hello.to == self;
  if (hello.magic != Hello::right_magic || hello.token != token || !is_rank) return std::nullopt;
  return hello.from;
}

Frame parse_frame(std::span<const std::byte, sizeof(Frame)> bytes, Way way) {
  Frame frame;
  std::memcpy(&frame, bytes.data(), sizeof frame);
  const auto most = most_bytes(frame.kind, way);
  if (!most || frame.bytes > *most || frame.tag < 0 || (needs_number(frame.kind) && frame.number == 0))
    throw Error(ErrorKind::corrupt,
                fmt::format("a garbled frame (kind {}, tag {}, number {}, {} bytes)",
                            static_cast<std::uint32_t>(frame.kind), frame.tag, frame.number, frame.bytes));
  return frame;
}

}  // namespace muster::tcp

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Unix sockets in the abstract namespace: packets with file descriptors, between processes of one uid. Nothing here
// waits: callers poll in slices.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

struct Packet {
  std::vector<std::byte> bytes;
  std::vector<Fd> descriptors;  ///< that came with it, in order
};

/// Of one packet: what the kernel takes.
inline constexpr std::size_t most_descriptors = 253;

enum class SocketStatus : std::uint8_t { done, again, closed };

/// A listening socket; the name vanishes with it. Throws Error(argument) with EADDRINUSE if another process has the
/// name.
Fd listen_abstract(const std::string& name);
/// None if nobody listens (yet). Throws Error(io) on anything else, Error(unsupported) if the listener belongs to
/// another uid.
std::optional<Fd> connect_abstract(const std::string& name);
/// The next connection of our own uid, none if there is none now. Connections of others are closed and passed over.
std::optional<Fd> accept_own(const Fd& listener);

/// Sends one packet with at most most_descriptors. It goes whole or not at all.
SocketStatus send_packet(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors = {});
/// Receives one packet of at most `most` bytes; `again` where none has come. Longer packets are Error(corrupt).
SocketStatus receive_packet(const Fd& socket, std::size_t most, Packet& packet);

/// Waits until the socket is readable (or hung up), at most `longest`.
bool wait_readable(const Fd& socket, std::chrono::milliseconds longest) noexcept;
bool wait_writable(const Fd& socket, std::chrono::milliseconds longest) noexcept;

}  // namespace muster::os

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Functions for non-blocking stream sockets: Unix sockets in the abstract namespace, which can also transfer file
// descriptors, and connected sockets of any other family. Only poll_sockets() waits.

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

/// The maximum number of file descriptors that the kernel accepts in one call.
inline constexpr std::size_t most_descriptors = 253;

/// Listens at an abstract name, which exists as long as the socket. Throws Error(invalid_argument) with EADDRINUSE if
/// another process has the name.
Fd listen_abstract(const std::string& name);
/// Connects to a listener. Returns nullopt if no process listens yet. Throws Error(unsupported) if the listener belongs
/// to another user, and Error(io) on any other failure.
std::optional<Fd> connect_abstract(const std::string& name);
/// Holds a name in this network namespace for as long as the descriptor is open. Throws as listen_abstract().
Fd hold_name(const std::string& name);
/// Returns whether a process of this network namespace holds the name.
bool is_name_held(const std::string& name);

/// Accepts the next connection of a listening socket. Returns nullopt if none is waiting. Throws Error(io |
/// out_of_space) if this process lacks a descriptor or memory for it.
std::optional<Fd> accept_next(const Fd& listener);
/// Returns whether the process at the other end of a Unix socket belongs to the user of this process.
bool is_of_own_user(const Fd& socket);
/// Returns the process at the other end of a Unix socket, or 0 if it is in a PID namespace that this process cannot
/// see.
std::int64_t peer_pid(const Fd& socket);

enum class SocketStatus : std::uint8_t { done, again, closed };
struct Transferred {
  SocketStatus status = SocketStatus::done;
  std::size_t bytes = 0;
};
/// Sends as many bytes as the kernel accepts; the descriptors are sent with the first byte. Throws Error(io |
/// out_of_space) if this process fails. With status `closed`, errno is the reason.
Transferred send_some(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors = {});
/// Receives the bytes that have arrived, and appends their descriptors to `descriptors`. Throws as send_some() does.
/// With status `closed`, errno is the reason, or 0 if the other side has closed the connection.
Transferred receive_some(const Fd& socket, std::span<std::byte> bytes, std::vector<Fd>& descriptors);

/// Waits at most `longest`, until one of the sockets is ready.
void poll_sockets(std::span<pollfd> sockets, std::chrono::milliseconds longest) noexcept;

}  // namespace muster::os

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stream sockets as descriptors: those of the abstract Unix namespace, which also carry file descriptors, and connected
// sockets of any other family. No function here waits, except poll_sockets().

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

/// The kernel takes at most this many file descriptors with one call.
inline constexpr std::size_t most_descriptors = 253;

/// Listens under a name that vanishes with the socket. Throws Error(argument) with EADDRINUSE if another process has
/// the name.
Fd listen_abstract(const std::string& name);
/// Returns nothing if no process listens yet. Throws Error(unsupported) if the listener belongs to another user,
/// Error(io) on any other failure.
std::optional<Fd> connect_abstract(const std::string& name);
/// Holds a name in this network namespace for as long as the descriptor is open. Throws as listen_abstract().
Fd hold_name(const std::string& name);
/// Returns whether a process of this network namespace holds the name.
bool is_name_held(const std::string& name);

/// Returns the next connection of a listening socket, or nothing if there is none now. Throws Error(io | no_space) if
/// this process lacks a descriptor or memory for it.
std::optional<Fd> accept_next(const Fd& listener);
/// Returns whether the process at the other end of a Unix socket has this process's user.
bool is_of_own_user(const Fd& socket);

enum class SocketStatus : std::uint8_t { done, again, closed };
struct Transferred {
  SocketStatus status = SocketStatus::done;
  std::size_t bytes = 0;
};
/// Sends as many bytes as the kernel takes; the descriptors travel with the first of them. Throws Error(io | no_space)
/// on a failure of this process. `closed`: errno tells how the other side was lost.
Transferred send_some(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors = {});
/// Receives what has come, and appends the descriptors that came along. Throws as send_some(). `closed` with errno 0:
/// the other side has closed the connection.
Transferred receive_some(const Fd& socket, std::span<std::byte> bytes, std::vector<Fd>& descriptors);

/// Waits until one of them is ready, at most `longest`.
void poll_sockets(std::span<pollfd> sockets, std::chrono::milliseconds longest) noexcept;

}  // namespace muster::os

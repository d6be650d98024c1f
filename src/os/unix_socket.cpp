// SPDX-License-Identifier: Apache-2.0
#include "src/os/unix_socket.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "src/os/fault.hpp"
#include "src/os/process.hpp"

namespace muster::os {
namespace {

constexpr std::string_view socket_seam = "a rank's socket";  // fault.hpp
constexpr int socket_type = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
};

Address abstract_address(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.value.sun_path)
    throw Error(ErrorKind::argument, "socket name '" + name + "' is too long");
  // The leading zero byte makes the name abstract: no file, gone with the socket.
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd make_socket() {
  Fd socket(try_call("socket", socket_seam, [] { return ::socket(AF_UNIX, socket_type, 0); }));
  if (!socket) throw errno_error("making a Unix socket");
  return socket;
}

bool peer_is_own_uid(const Fd& socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw errno_error("asking for a peer's credentials");
  return credentials.uid == user_id();
}

bool wait_for(const Fd& socket, short events, std::chrono::milliseconds longest) noexcept {
  pollfd entry{socket.get(), events, 0};
  return ::poll(&entry, 1, static_cast<int>(longest.count())) > 0;
}

}  // namespace

Fd listen_abstract(const std::string& name) {
  Fd socket = make_socket();
  const Address address = abstract_address(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0)
    throw errno_error(errno == EADDRINUSE ? ErrorKind::argument : ErrorKind::io,
                      "binding the abstract socket @" + name);
  if (::listen(socket.get(), SOMAXCONN) != 0) throw errno_error("listening on the abstract socket @" + name);
  return socket;
}

std::optional<Fd> connect_abstract(const std::string& name) {
  Fd socket = make_socket();
  const Address address = abstract_address(name);
  if (is_faulty("connect", socket_seam) ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return std::nullopt;
    throw errno_error("connecting to the abstract socket @" + name);
  }
  if (!peer_is_own_uid(socket))
    throw Error(ErrorKind::unsupported, "the socket @" + name + " belongs to another user: choose another job key");
  return socket;
}

std::optional<Fd> accept_own(const Fd& listener) {
  for (;;) {
    Fd socket;
    if (!is_faulty("accept", socket_seam))
      socket = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      if (peer_is_own_uid(socket)) return socket;
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    throw errno_error("accepting a rank's connection");
  }
}

SocketStatus send_packet(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  if (descriptors.size() > most_descriptors)
    throw Error(ErrorKind::argument, "more file descriptors than one packet takes");
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * most_descriptors)> control;
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    std::fill_n(control.begin(), CMSG_SPACE(descriptors.size_bytes()), std::byte{});
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  if (try_call("sendmsg", socket_seam, [&] { return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL); }) >= 0)
    return SocketStatus::done;
  // ETOOMANYREFS: too many descriptors of this user are under way; the receivers will take them.
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ETOOMANYREFS) return SocketStatus::again;
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return SocketStatus::closed;
  throw errno_error("sending to a rank of this host");
}

SocketStatus receive_packet(const Fd& socket, std::size_t most, Packet& packet) {
  packet.bytes.resize(most);
  iovec data{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * most_descriptors)> control;
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t length = 0;
  // A peer that has closed without reading everything is reported once, ahead of what it had sent before: look again.
  bool was_reset = false;
  do {
    length = is_faulty("recvmsg", socket_seam) ? -1 : ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  } while (length < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(was_reset, true))));
  if (length < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return SocketStatus::again;
    if (errno == ECONNRESET) return SocketStatus::closed;
    throw errno_error("receiving from a rank of this host");
  }
  packet.descriptors.clear();
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof descriptor, sizeof descriptor);
      packet.descriptors.emplace_back(descriptor);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0)
    throw Error(ErrorKind::io,
                "a file descriptor from another rank could not be taken: raise the limit of open files (ulimit -n)");
  if ((message.msg_flags & MSG_TRUNC) != 0)
    throw Error(ErrorKind::corrupt, "a rank of this host sent a packet that is too long");
  if (length == 0) return SocketStatus::closed;
  packet.bytes.resize(static_cast<std::size_t>(length));
  return SocketStatus::done;
}

bool wait_readable(const Fd& socket, std::chrono::milliseconds longest) noexcept {
  return wait_for(socket, POLLIN, longest);
}
bool wait_writable(const Fd& socket, std::chrono::milliseconds longest) noexcept {
  return wait_for(socket, POLLOUT, longest);
}

}  // namespace muster::os

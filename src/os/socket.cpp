// SPDX-License-Identifier: Apache-2.0
#include "src/os/socket.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/os/fault.hpp"
#include "src/os/process.hpp"

namespace muster::os {
namespace {

constexpr std::string_view socket_seam = "a rank's socket";  // fault.hpp
constexpr int socket_flags = SOCK_CLOEXEC | SOCK_NONBLOCK;

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
};

std::string socket_text(const std::string& name) {
  return "socket " + in_quotes("@" + name);
}

Address abstract_address(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.value.sun_path)
    throw Error(ErrorKind::invalid_argument, "socket name " + in_quotes(name) + " is too long");
  // The leading zero byte makes the name abstract: no file, gone with the socket.
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd make_socket(int type) {
  Fd socket(try_call("socket", socket_seam, [&] { return ::socket(AF_UNIX, type | socket_flags, 0); }));
  if (!socket) throw errno_error("Unix socket: creating");
  return socket;
}

Fd bind_abstract(const std::string& name, int type) {
  Fd socket = make_socket(type);
  const Address address = abstract_address(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0)
    throw errno_error(errno == EADDRINUSE ? ErrorKind::invalid_argument : ErrorKind::io,
                      socket_text(name) + ": binding");
  return socket;
}

ucred peer_of(const Fd& socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw errno_error("Unix socket: reading the credentials of the peer");
  return credentials;
}

/// Returns whether an error means that the connection is lost, in contrast to a shortage of this process.
bool is_loss(int error) noexcept {
  switch (error) {
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
    case ECONNREFUSED:
      return true;
    default:
      return false;
  }
}

}  // namespace

Fd listen_abstract(const std::string& name) {
  Fd socket = bind_abstract(name, SOCK_STREAM);
  if (::listen(socket.get(), SOMAXCONN) != 0) throw errno_error(socket_text(name) + ": listening");
  return socket;
}

std::optional<Fd> connect_abstract(const std::string& name) {
  Fd socket = make_socket(SOCK_STREAM);
  const Address address = abstract_address(name);
  if (is_faulty("connect", socket_seam) ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return std::nullopt;
    throw errno_error(socket_text(name) + ": connecting");
  }
  if (!is_of_own_user(socket))
    throw Error(ErrorKind::unsupported,
                socket_text(name) + ": connecting: it belongs to another user. Choose another job key");
  return socket;
}

Fd hold_name(const std::string& name) {
  return bind_abstract(name, SOCK_DGRAM);
}

bool is_name_held(const std::string& name) {
  const Fd socket = make_socket(SOCK_DGRAM);
  const Address address = abstract_address(name);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) == 0;
}

std::optional<Fd> accept_next(const Fd& listener) {
  for (;;) {
    Fd socket;
    if (!is_faulty("accept", socket_seam)) socket = Fd(::accept4(listener.get(), nullptr, nullptr, socket_flags));
    if (socket) return socket;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
    // These errors concern the incoming connection, not the listener (accept(2)).
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO || errno == ENONET || errno == EHOSTDOWN ||
        errno == ENOPROTOOPT || errno == EOPNOTSUPP || is_loss(errno))
      continue;
    throw errno_error("Unix socket: accepting a connection of a rank");
  }
}

bool is_of_own_user(const Fd& socket) {
  return peer_of(socket).uid == user_id();
}

std::int64_t peer_pid(const Fd& socket) {
  return peer_of(socket).pid;
}

Transferred send_some(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  if (descriptors.size() > most_descriptors)
    throw Error(ErrorKind::invalid_argument, "Unix socket: sending: more file descriptors than one packet holds");
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
  const ssize_t sent =
      try_call("sendmsg", socket_seam, [&] { return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL); });
  if (sent >= 0) return {SocketStatus::done, static_cast<std::size_t>(sent)};
  // ETOOMANYREFS: too many descriptors of this user are in flight; their receivers will take them.
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS) return {SocketStatus::again};
  if (is_loss(errno)) return {SocketStatus::closed};
  throw errno_error("Unix socket: sending to a rank");
}

Transferred receive_some(const Fd& socket, std::span<std::byte> bytes, std::vector<Fd>& descriptors) {
  iovec data{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * most_descriptors)> control;
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t length = 0;
  // If the peer has closed without reading all data, the kernel reports this once, before the bytes that the peer had
  // sent.
  bool was_reset = false;
  do {
    length = is_faulty("recvmsg", socket_seam) ? -1 : ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  } while (length < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(was_reset, true))));
  if (length < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {SocketStatus::again};
    if (is_loss(errno)) return {SocketStatus::closed};
    throw errno_error("Unix socket: receiving from a rank");
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof descriptor, sizeof descriptor);
      descriptors.emplace_back(descriptor);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0)
    throw errno_error("Unix socket: receiving a file descriptor of a rank", EMFILE);
  errno = 0;
  return {length == 0 ? SocketStatus::closed : SocketStatus::done, static_cast<std::size_t>(length)};
}

void poll_sockets(std::span<pollfd> sockets, std::chrono::milliseconds longest) noexcept {
  ::poll(sockets.data(), sockets.size(), static_cast<int>(std::max<std::int64_t>(longest.count(), 0)));
}

}  // namespace muster::os

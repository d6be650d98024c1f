// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/sockets.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/ip/v6_only.hpp>
#include <charconv>
#include <memory>
#include <mutex>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"
#include "src/os/fault.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"

namespace muster::tcp {
namespace {

void set(int socket, int level, int name, int value) noexcept {
  // The connection also works without this option.
  ::setsockopt(socket, level, name, &value, sizeof value);
}

int descriptor_for(const Endpoint& address) {
  const int descriptor = os::try_call("socket", "TCP", [&] {
    return ::socket(address.protocol().family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  });
  if (descriptor < 0) throw os::errno_error("TCP: creating a socket");
  return descriptor;
}

struct Forkables {
  ForkMutex mutex;
  std::vector<Forkable*> all;
};

/// Never destroyed, because a process may fork while it exits.
Forkables& forkables() {
  static auto* const the_forkables = [] {
    ::pthread_atfork(
        [] {
          forkables().mutex.lock();
          for (Forkable* const one : forkables().all) one->before_fork();
        },
        [] {
          for (Forkable* const one : forkables().all) one->after_fork();
          forkables().mutex.unlock();
        },
        [] {
          for (Forkable* const one : forkables().all) one->in_child();
          forkables().mutex.unlock();
        });
    return new Forkables;
  }();
  return *the_forkables;
}

}  // namespace

std::string text_of(const Endpoint& endpoint) {
  const asio::ip::address& address = endpoint.address();
  if (address.is_v6() && address.to_v6().is_v4_mapped())
    return text_of({asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()), endpoint.port()});
  return fmt::format("{}{}{}:{}", address.is_v6() ? "[" : "", address.to_string(), address.is_v6() ? "]" : "",
                     endpoint.port());
}

Socket new_socket(asio::io_context& io, const Endpoint& for_address) {
  return {io, for_address.protocol(), descriptor_for(for_address)};
}

void tune(int descriptor) noexcept {
  set(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

Acceptor listen_at(asio::io_context& io, const Endpoint& endpoint) {
  Acceptor acceptor(io, endpoint.protocol(), descriptor_for(endpoint));
  error_code failure;
  // Connections of an earlier job that the kernel still keeps must not block the port.
  acceptor.set_option(Acceptor::reuse_address(true), failure);
  if (endpoint.address().is_v6()) acceptor.set_option(asio::ip::v6_only(false), failure);
  acceptor.bind(endpoint, failure);
  if (!failure) acceptor.listen(SOMAXCONN, failure);
  if (failure)
    throw with_remedy(
        os::errno_error(ErrorKind::io, fmt::format("TCP: listening at {}", text_of(endpoint)), failure.value()),
        "Choose a free port and an address of this host");
  return acceptor;
}

Acceptor listen_anywhere(asio::io_context& io, const asio::ip::address& address) {
  if (!address.is_unspecified()) return listen_at(io, Endpoint(address, 0));
  try {
    return listen_at(io, Endpoint(asio::ip::address_v6::any(), 0));
  } catch (const Error&) {
    // The kernel does not support IPv6.
    return listen_at(io, Endpoint(asio::ip::address_v4::any(), 0));
  }
}

std::uint16_t port_of(int socket) noexcept {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  // The port is at the same offset in both kinds of addresses.
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Acceptor adopt_listener(asio::io_context& io, int descriptor) {
  int is_listening = 0;
  int family = 0;
  socklen_t length = sizeof(int);
  if (::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &length) != 0 || is_listening == 0 ||
      ::getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &family, &length) != 0 ||
      (family != AF_INET && family != AF_INET6))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("TCP: descriptor {} is not a listening TCP socket", descriptor));
  ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  ::fcntl(descriptor, F_SETFL, O_NONBLOCK);
  Acceptor acceptor(io);
  acceptor.assign(family == AF_INET6 ? Protocol::v6() : Protocol::v4(), descriptor);
  return acceptor;
}

std::optional<Acceptor> inherited_listener(asio::io_context& io, std::uint16_t port) {
  static std::atomic<bool> is_taken{false};
  const auto text = os::environment("MUSTER_LISTENER");
  if (!text) return std::nullopt;
  int descriptor = -1;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), descriptor);
  if (error != std::errc{} || end != text->data() + text->size() || descriptor <= STDERR_FILENO ||
      port_of(descriptor) != port || is_taken.exchange(true))
    return std::nullopt;
  try {
    return adopt_listener(io, descriptor);
  } catch (const Error&) {
    return std::nullopt;
  }
}

Socket accept_one(Acceptor& acceptor, asio::io_context& io) noexcept {
  Socket socket(io);
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  const int descriptor =
      ::accept4(acceptor.native_handle(), reinterpret_cast<sockaddr*>(&address), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (descriptor < 0) return socket;
  error_code failure;
  socket.assign(address.ss_family == AF_INET6 ? Protocol::v6() : Protocol::v4(), descriptor, failure);
  if (failure) os::Fd(descriptor).reset();
  return socket;
}

std::vector<asio::ip::address> own_addresses() {
  std::vector<asio::ip::address> all;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {asio::ip::address_v4::loopback()};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    if (one->ifa_addr->sa_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
      all.emplace_back(asio::ip::address_v4(ntohl(address->sin_addr.s_addr)));
    } else if (one->ifa_addr->sa_family == AF_INET6) {
      const auto* own = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr);
      asio::ip::address_v6::bytes_type bytes;
      std::ranges::copy(own->sin6_addr.s6_addr, bytes.begin());
      // Link-local addresses are useless on another link.
      if (const asio::ip::address_v6 address(bytes); !address.is_link_local()) all.emplace_back(address);
    }
  }
  all.emplace_back(asio::ip::address_v4::loopback());
  return all;
}

bool has_network() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return true;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next)
    if ((one->ifa_flags & IFF_UP) != 0) return true;
  return false;
}

void Forkable::begin_forkable() {
  Forkables& them = forkables();
  const std::lock_guard lock(them.mutex);
  them.all.push_back(this);
}

void Forkable::end_forkable() noexcept {
  Forkables& them = forkables();
  const std::lock_guard lock(them.mutex);
  std::erase(them.all, this);
}

void give_up(int descriptor) noexcept {
  if (descriptor < 0) return;
  const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nowhere < 0) return;
  ::dup3(nowhere, descriptor, O_CLOEXEC);
  ::close(nowhere);
}

}  // namespace muster::tcp

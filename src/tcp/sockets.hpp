// SPDX-License-Identifier: Apache-2.0
#pragma once
// TCP sockets as all of this folder uses them: polled, never inherited by programs that the process starts, and named
// in messages.

#include <algorithm>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/os/clock.hpp"

/// How timers of the deadlines' clock sleep.
template <>
struct boost::asio::wait_traits<muster::os::Clock> {
  using Clock = muster::os::Clock;
  static Clock::duration to_wait_duration(Clock::duration left) {
    return std::min<Clock::duration>(left, Clock::longest_sleep);
  }
  static Clock::duration to_wait_duration(Clock::time_point end) { return to_wait_duration(end - Clock::now()); }
};

namespace muster::tcp {

namespace asio = boost::asio;
using Protocol = asio::ip::tcp;
using Socket = Protocol::socket;
using Acceptor = Protocol::acceptor;
using Endpoint = Protocol::endpoint;
using Timer = asio::basic_waitable_timer<os::Clock>;
using boost::system::error_code;

/// "10.0.0.1:29500", "[fe80::1]:29500"
std::string text_of(const Endpoint& endpoint);

/// Not connected. Throws Error(io).
Socket new_socket(asio::io_context& io, const Endpoint& for_address);
/// What a connection of ranks has: short messages go at once, and an idle one whose other host has gone ends within
/// half a minute. What is under way has no deadline of its own: its receiver may be busy, and the waits of groups have
/// one.
void tune(int socket) noexcept;

/// Listens at the address. Throws Error(io) that names it and the remedy.
Acceptor listen_at(asio::io_context& io, const Endpoint& endpoint);
/// At a free port of all addresses of this host, or of one.
Acceptor listen_anywhere(asio::io_context& io, const asio::ip::address& address);
/// 0 if it has none.
std::uint16_t port_of(int socket) noexcept;
/// The socket that the launcher of this process listens at for it (MUSTER_LISTENER), if it is at that port. Once.
std::optional<Acceptor> inherited_listener(asio::io_context& io, std::uint16_t port);
/// Takes a listening socket that a program hands over. Throws Error(argument), and leaves it alone, if it is not one.
Acceptor adopt_listener(asio::io_context& io, int descriptor);
/// The next connection that has come; a closed socket if there is none.
Socket accept_one(Acceptor& acceptor, asio::io_context& io) noexcept;

/// All addresses of this host that others could reach it by; its loopback address is the last.
std::vector<asio::ip::address> own_addresses();
/// Whether a network interface of this host is up, the loopback included.
bool has_network();

/// What has sockets. A child that a rank forks has all of its connections, too. While it keeps them open nobody sees
/// the rank's end: so the child gives them up at once. The three are called around each fork of the process, in the
/// thread that forks.
class Forkable {
 public:
  Forkable& operator=(Forkable&&) = delete;

  /// No other thread may change its sockets until one of the next two.
  virtual void before_fork() = 0;
  virtual void after_fork() = 0;
  /// In the child, which has one thread: only what is safe in a signal handler, but for the lock.
  virtual void in_child() noexcept = 0;

 protected:
  ~Forkable() = default;
  /// From here on forks count,
  void begin_forkable();
  /// and no more.
  void end_forkable() noexcept;
};

/// In a child: the descriptor stays one, but of nothing.
void give_up(int descriptor) noexcept;

}  // namespace muster::tcp

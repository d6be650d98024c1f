// SPDX-License-Identifier: Apache-2.0
#pragma once
// TCP sockets as this folder uses them: non-blocking, polled, closed on exec, and with addresses in error messages.

#include <algorithm>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/os/clock.hpp"

/// Lets timers use the clock of the deadlines.
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

/// Returns a text such as "10.0.0.1:29500" or "[fe80::1]:29500".
std::string text_of(const Endpoint& endpoint);

/// Returns a socket that is not connected. Throws Error(io).
Socket new_socket(asio::io_context& io, const Endpoint& for_address);
/// Sets the options of a connection between ranks. Short messages are sent without delay. An idle connection ends
/// within half a minute after the other host has disappeared. Data in flight has no deadline of its own, because its
/// receiver may be busy; the waits of groups have deadlines.
void tune(int socket) noexcept;

/// Listens at the address. Throws Error(io) with the address and the remedy.
Acceptor listen_at(asio::io_context& io, const Endpoint& endpoint);
/// Listens at a free port of one address, or of all addresses of this host.
Acceptor listen_anywhere(asio::io_context& io, const asio::ip::address& address);
/// Returns 0 if the socket has no port.
std::uint16_t port_of(int socket) noexcept;
/// Returns the socket at which the launcher of this process listens on its behalf (MUSTER_LISTENER), if it has that
/// port. Returns it only once.
std::optional<Acceptor> inherited_listener(asio::io_context& io, std::uint16_t port);
/// Takes over a listening socket of the program. If it is not a listening socket, throws Error(invalid_argument) and
/// leaves it unchanged.
Acceptor adopt_listener(asio::io_context& io, int descriptor);
/// Returns the next pending connection, or a closed socket if there is none.
Socket accept_one(Acceptor& acceptor, asio::io_context& io) noexcept;

/// Returns all addresses at which other hosts could reach this host; the loopback address is the last one.
std::vector<asio::ip::address> own_addresses();
/// Returns whether a network interface of this host, including the loopback interface, is up.
bool has_network();

/// Base class of objects with sockets. A child that a rank forks inherits all of its connections. While the child keeps
/// them open, no other rank notices the end of this rank. So the child gives them up at once. The three functions are
/// called around each fork, in the thread that forks.
class Forkable {
 public:
  Forkable& operator=(Forkable&&) = delete;

  /// No other thread may change the sockets until one of the next two functions is called.
  virtual void before_fork() = 0;
  virtual void after_fork() = 0;
  /// Called in the child, which has one thread. Except for the lock, only async-signal-safe functions may be used.
  virtual void in_child() noexcept = 0;

 protected:
  ~Forkable() = default;
  /// Begins to handle forks.
  void begin_forkable();
  /// Stops handling forks.
  void end_forkable() noexcept;
};

/// Closes the connection in a forked child. The descriptor remains valid but refers to no connection.
void give_up(int descriptor) noexcept;

}  // namespace muster::tcp

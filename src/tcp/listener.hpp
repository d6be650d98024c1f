// SPDX-License-Identifier: Apache-2.0
#pragma once
// Listener: accepts connections from ranks of this job and closes all others. A connection without the correct Hello is
// a stranger. The number of connections that have not sent it is limited, and each of them may exist only for a few
// seconds.

#include <array>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>

#include "src/base/rare_log.hpp"
#include "src/os/clock.hpp"
#include "src/tcp/connection.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::tcp {

class Listener {
 public:
  /// Receives the connection of a rank whose Hello was correct.
  using Accepted = std::function<void(int rank, Socket socket)>;
  Listener(asio::io_context& io, Acceptor acceptor, const Token& token, int self, int size, Accepted accepted);
  void close();
  /// Throws the error that prevents this process from accepting connections, if it has lasted for a while.
  void throw_if_blocked() const;
  /// Called in a forked child.
  void give_up_sockets() noexcept;

 private:
  struct PendingGuest {
    explicit PendingGuest(Socket connection) : socket(std::move(connection)), deadline(socket.get_executor()) {}
    Socket socket;
    Timer deadline;
    std::array<std::byte, sizeof(TcpHello)> hello{};
    std::size_t got = 0;
    bool is_gone = false;
  };
  using GuestPointer = std::shared_ptr<PendingGuest>;
  void wait();
  void take_in();
  void hear(const GuestPointer& guest);
  void drop(const GuestPointer& guest, const char* why);
  void forget(const GuestPointer& guest);

  asio::io_context& io_;
  Acceptor acceptor_;
  Timer pause_;
  std::optional<os::Clock::time_point> blocked_since_;
  int blocked_by_ = 0;  // errno
  const Token token_;
  const int self_;
  const int size_;
  Accepted accepted_;
  std::list<GuestPointer> guests_;
  RareLog strangers_{LogLevel::info};
};

}  // namespace muster::tcp

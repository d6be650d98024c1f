// SPDX-License-Identifier: Apache-2.0
#pragma once
// Hosts that are users: ranks of different users do not meet in shared memory, as on different machines. They need no
// network of their own (networks.hpp), so that one machine imitates hundreds of them.

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "muster/sync_group.hpp"
#include "muster/tcp.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::test {

/// In a forked rank: it is on that host from now on.
inline void enter_host(int host) {
  const auto user = static_cast<uid_t>(200'000 + host);
  if (::setresuid(user, user, user) != 0) throw std::runtime_error("no other user can be taken here: that needs root");
  // Both end with the change of the user.
  ::prctl(PR_SET_DUMPABLE, 1);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
}

/// An address of this machine that was free a moment ago.
inline std::string free_local_address() {
  tcp::asio::io_context io;
  const tcp::Acceptor acceptor = tcp::listen_anywhere(io, tcp::asio::ip::address_v4::loopback());
  return tcp::text_of(acceptor.local_endpoint());
}

/// In a rank of `size` on `hosts`, in equal parts: enters its host, and meets the others.
inline std::shared_ptr<SyncGroup> join_on_host(const std::string& address, int rank, int size, int hosts,
                                               std::chrono::milliseconds timeout) {
  enter_host(rank * hosts / size);
  return tcp_group({.address = address, .rank = rank, .size = size, .timeout = timeout, .key = "test"});
}

}  // namespace muster::test

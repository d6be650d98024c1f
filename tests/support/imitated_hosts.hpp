// SPDX-License-Identifier: Apache-2.0
#pragma once
// Imitates hosts by users: like ranks on different machines, ranks of different users do not use shared memory
// together. Such hosts need no private network (networks.hpp), so one machine can imitate hundreds of them.

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "muster/group.hpp"
#include "muster/tcp.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::test {

/// Called in a forked rank: moves it to that host.
inline void enter_host(int host) {
  const auto user = static_cast<uid_t>(200'000 + host);
  if (::setresuid(user, user, user) != 0) throw std::runtime_error("no other user can be taken here: that needs root");
  // The change of the user has reset both settings.
  ::prctl(PR_SET_DUMPABLE, 1);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
}

/// Returns an address of this machine whose port was free when it was tested.
inline std::string free_local_address() {
  tcp::asio::io_context io;
  const tcp::Acceptor acceptor = tcp::listen_anywhere(io, tcp::asio::ip::address_v4::loopback());
  return tcp::text_of(acceptor.local_endpoint());
}

/// Called in a forked rank: enters the rank's host, and joins the group. The `size` ranks are distributed equally over
/// `hosts` hosts.
inline std::shared_ptr<Group> join_on_host(const std::string& address, int rank, int size, int hosts,
                                           std::chrono::milliseconds timeout) {
  enter_host(rank * hosts / size);
  return tcp_group({.address = address, .rank = rank, .size = size, .timeout = timeout, .key = "test"});
}

}  // namespace muster::test

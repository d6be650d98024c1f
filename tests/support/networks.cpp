// SPDX-License-Identifier: Apache-2.0
#include "tests/support/networks.hpp"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

namespace muster::test {

os::Fd fresh_network() {
  int ready[2] = {-1, -1};
  if (::pipe2(ready, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const pid_t child = ::fork();
  if (child == 0) {
    const char word = ::unshare(CLONE_NEWNET) == 0 ? 'y' : 'n';
    if (::write(ready[1], &word, 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  char word = 'n';
  if (::read(ready[0], &word, 1) != 1) word = 'n';
  const std::string path = "/proc/" + std::to_string(child) + "/ns/net";
  os::Fd network(word == 'y' ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC) : -1);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  if (!network) throw std::runtime_error("no network namespace can be made here: that needs root");
  return network;
}

std::string network_address(int host) {
  return "10.78.0." + std::to_string(host + 1);
}

void join_networks(const std::vector<os::Fd>& networks) {
  const auto path = [](const os::Fd& network) {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(network.get());
  };
  const auto inside = [&](const os::Fd& network, const std::string& commands) {
    return "nsenter --net=" + path(network) + " sh -e -c '" + commands + "'";
  };
  // The first host has a bridge to which all hosts are connected.
  std::string first = "ip link set lo up; ip link add link0 type bridge; ip address add " + network_address(0) +
                      "/24 dev link0; ip link set link0 up";
  std::string others;
  for (std::size_t host = 1; host < networks.size(); ++host) {
    const std::string port = "port" + std::to_string(host);
    first += "; ip link add " + port + " type veth peer name link0 netns " + path(networks[host]) + "; ip link set " +
             port + " master link0 up";
    others +=
        " && " + inside(networks[host], "ip link set lo up; ip address add " + network_address(static_cast<int>(host)) +
                                            "/24 dev link0; ip link set link0 up; timeout 5 sh -c \"until ip link "
                                            "show link0 | grep -q state.UP; do sleep 0.01; done\"");
  }
  if (std::system((inside(networks.front(), first) + others).c_str()) != 0)
    throw std::runtime_error("no network cards can be made here");
}

void enter_network(const os::Fd& network) {
  if (::setns(network.get(), CLONE_NEWNET) != 0) throw std::runtime_error("setns");
}

}  // namespace muster::test

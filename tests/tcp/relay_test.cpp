// SPDX-License-Identifier: Apache-2.0
// Relays of a rendezvous over TCP (src/rendezvous/relay.hpp): one rank dies, stops, fails or sends malformed bytes,
// before or after rank 0 has accepted the relay. Rank 0 is on one host. Ranks 1, 2 and 3 are on another one, and rank 1
// is their relay.

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "muster/interrupt.hpp"
#include "muster/tcp.hpp"
#include "src/multihost/context.hpp"
#include "src/os/process.hpp"
#include "src/os/socket.hpp"
#include "src/rendezvous/relay.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/imitated_hosts.hpp"
#include "tests/support/sandbox.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using std::chrono::milliseconds;

constexpr int ranks = 4;
const std::vector<int> usual_hosts = {0, 1, 1, 1};  // by rank

enum class Deed { dies, stops, fails, is_interrupted, spoils };
/// When the culprit acts: while it connects to rank 0, or when it prepares its part, after rank 0 has accepted it.
enum class When { connecting, preparing };

struct Way {
  int culprit;
  Deed deed;
  When when;
  ErrorKind kind;
  const char* words;
  milliseconds deadline = 20s;
};

bool is_interrupted = false;

void act(Deed deed) {
  // The other ranks of the host find the relay meanwhile.
  std::this_thread::sleep_for(300ms);
  const std::string garbage(400, 'U');
  switch (deed) {
    case Deed::dies:
      ::raise(SIGKILL);
      break;
    case Deed::stops:
      ::raise(SIGSTOP);
      break;
    case Deed::fails:
      limit_open_files(0, 0);
      break;
    case Deed::is_interrupted:
      is_interrupted = true;
      set_interrupt_hook([]() noexcept { return is_interrupted; });
      break;
    case Deed::spoils:
      for (int descriptor = 3; descriptor < 100; ++descriptor)
        (void)::send(descriptor, garbage.data(), garbage.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      break;
  }
}

/// Waits until another rank has set the word.
void await(std::atomic<std::uint64_t>& word) {
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (word == 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
}

/// Starts the ranks in the order that makes rank 1 the relay of its host. `then` is called in each rank when it makes a
/// TCP socket: in rank 1 to connect, and in each rank for its part.
std::shared_ptr<Group> join_in_order(SharedWords& words, const std::string& address, int rank, milliseconds deadline,
                                     const std::function<void(int)>& then,
                                     const std::vector<int>& hosts = usual_hosts) {
  enum : int { root_listens, relay_connects };
  int sockets = 0;
  const FailingCall each_socket({.call = "socket", .path = "TCP", .then = [&] {
                                   // Rank 0 makes its second socket, for its part, after the first one listens.
                                   if (rank == 0 && sockets == 1) words[root_listens] = 1;
                                   if (rank == 1) words[relay_connects] = 1;
                                   then(++sockets);
                                 }});
  enter_host(hosts[static_cast<std::size_t>(rank)]);
  if (rank == 1) await(words[root_listens]);
  if (rank > 1) await(words[relay_connects]);
  return tcp_group(
      {.address = address, .rank = rank, .size = static_cast<int>(hosts.size()), .timeout = deadline, .key = "test"});
}

void check(const Way& way) {
  CAPTURE(way.culprit);
  CAPTURE(static_cast<int>(way.deed));
  CAPTURE(static_cast<int>(way.when));
  SharedWords words;
  const std::string address = free_local_address();
  const int step = way.culprit == 1 && way.when == When::preparing ? 2 : 1;
  Ranks processes(ranks, [&](int rank) {
    const Error error = error_of(way.kind, {way.words}, [&] {
      const auto group = join_in_order(words, address, rank, way.deadline, [&](int sockets) {
        if (rank == way.culprit && sockets == step) act(way.deed);
      });
    });
    if (error.rank() != way.culprit) throw RankFailure(error.what());
    say(error.what());
  });
  const std::vector<Ended> ended = way.deed == Deed::stops ? processes.wait_and_kill(way.culprit, way.deadline + 10s)
                                                           : processes.wait(way.deadline + 10s);
  for (int rank = 0; rank < ranks; ++rank) {
    CAPTURE(rank);
    const Ended& one = ended[static_cast<std::size_t>(rank)];
    if (rank != way.culprit) CHECK_MESSAGE(one.ok(), one.words);
  }
}

bool can_imitate_hosts() {
  if (::geteuid() == 0) return true;
  MESSAGE("skipped: imitated hosts need root");
  return false;
}

}  // namespace

TEST_CASE("a relay that fails after rank 0 has accepted it is named by all ranks") {
  if (!can_imitate_hosts()) return;
  for (const Way& way : {Way{1, Deed::dies, When::preparing, ErrorKind::peer_lost, "rank 1 (host "},
                         Way{1, Deed::fails, When::preparing, ErrorKind::io, "rank 1 (host "},
                         Way{1, Deed::is_interrupted, When::preparing, ErrorKind::cancelled, "rank 1 (host "},
                         Way{1, Deed::spoils, When::preparing, ErrorKind::corrupt, "rank 1 (host "}})
    check(way);
}

TEST_CASE("a rank behind a relay that fails is named by all ranks, and not its relay") {
  if (!can_imitate_hosts()) return;
  for (const Way& way : {Way{2, Deed::dies, When::preparing, ErrorKind::peer_lost, "rank 2 (host "},
                         Way{2, Deed::stops, When::preparing, ErrorKind::timeout, "behind rank 1, pid ", 1500ms},
                         Way{2, Deed::fails, When::preparing, ErrorKind::io, "rank 2 (host "},
                         Way{2, Deed::is_interrupted, When::preparing, ErrorKind::cancelled, "rank 2 (host "},
                         Way{2, Deed::spoils, When::preparing, ErrorKind::corrupt, "rank 2 (host "}})
    check(way);
}

TEST_CASE("the ranks behind a relay that dies or stops while it connects reach rank 0 without it") {
  if (!can_imitate_hosts()) return;
  // Only rank 1 is missing at the deadline. A rank leaves a silent relay after five seconds.
  check({1, Deed::dies, When::connecting, ErrorKind::timeout, "for rank 1 of 4 ranks", 3s});
  check({1, Deed::stops, When::connecting, ErrorKind::timeout, "for rank 1 of 4 ranks", 8s});
}

namespace {

/// Runs all ranks except the last one, so that the rendezvous remains incomplete. After all others have joined, one of
/// them acts. `body` is called with the error of each of the others.
void check_incomplete(int culprit, Deed deed, const std::function<void(int, const Error&)>& body) {
  SharedWords words;
  const std::string address = free_local_address();
  Ranks processes(ranks - 1, [&](int rank) {
    std::jthread deed_of_culprit;
    const Error error = error_of([&] {
      (void)join_in_order(words, address, rank, 2s, [&](int sockets) {
        if (rank == culprit && sockets == (rank == 2 ? 1 : 2))
          deed_of_culprit = std::jthread([&] {
            await(words[2]);
            act(deed);
          });
      });
    });
    body(rank, error);
  });
  std::this_thread::sleep_for(500ms);
  words[2] = 1;
  const std::vector<Ended> ended = deed == Deed::stops ? processes.wait_and_kill(culprit, 15s) : processes.wait(15s);
  for (int rank = 0; rank < ranks - 1; ++rank) {
    const Ended& one = ended[static_cast<std::size_t>(rank)];
    if (rank != culprit) CHECK_MESSAGE(one.ok(), one.words);
  }
}

void expect(const Error& error, ErrorKind kind, int rank, const char* words) {
  if (error.kind() != kind || error.rank() != rank || !says(error, words)) throw RankFailure(error.what());
}

}  // namespace

TEST_CASE("rank 0 that dies or stops is named by the relay and by the rank behind it") {
  if (!can_imitate_hosts()) return;
  check_incomplete(0, Deed::dies,
                   [](int, const Error& error) { expect(error, ErrorKind::peer_lost, 0, "rank 0 (host "); });
  check_incomplete(0, Deed::stops, [](int, const Error& error) {
    expect(error, ErrorKind::timeout, 0, "did not complete the rendezvous");
    RANK_CHECK(!says(error, "rank 1 (host "));
  });
}

TEST_CASE("a relay that stops while all ranks wait is named by the rank behind it, together with rank 0") {
  if (!can_imitate_hosts()) return;
  check_incomplete(1, Deed::stops, [](int rank, const Error& error) {
    if (rank == 0) return expect(error, ErrorKind::timeout, 3, "for rank 3 of 4 ranks");
    expect(error, ErrorKind::timeout, 1, "rank 0 (host ");
    expect(error, ErrorKind::timeout, 1, "or rank 1 (host ");
  });
  check_incomplete(1, Deed::dies,
                   [](int, const Error& error) { expect(error, ErrorKind::peer_lost, 1, "rank 1 (host "); });
}

TEST_CASE(
    "a relay that stops before it has passed the hellos of its ranks on is named by rank 0, and its pid by them") {
  if (!can_imitate_hosts()) return;
  SharedWords words;
  const std::string address = free_local_address();
  Ranks processes(ranks, [&](int rank) {
    const Error error = error_of(ErrorKind::timeout, {}, [&] {
      (void)join_in_order(words, address, rank, 1500ms, [&](int sockets) {
        if (rank != 1 || sockets != 2) return;
        words[3] = static_cast<std::uint64_t>(::getpid());
        act(Deed::stops);
      });
    });
    if (rank == 0) return expect(error, ErrorKind::timeout, 1, "rank 1 (host ");
    // Whether the relay has sent its card yet is left to chance.
    expect(error, ErrorKind::timeout, 0, ("pid " + std::to_string(words[3].load()) + ")").c_str());
  });
  check_ended(processes.wait_and_kill(1, 10s), {1});
}

namespace {

enum : int { stopped = 8, connections };

/// One process stops itself when it makes its second TCP socket, and is continued after all others have lost patience
/// with it once. All ranks meet. `latecomer` starts after it has stopped.
void check_pause(int paused, int latecomer, const std::vector<int>& hosts) {
  SharedWords words;
  const std::string address = free_local_address();
  Ranks processes(ranks, [&](int rank) {
    if (rank == latecomer) await(words[stopped]);
    auto group = join_in_order(
        words, address, rank, 60s,
        [&](int sockets) {
          if (rank != paused || sockets != 2) return;
          words[stopped] = 1;
          act(Deed::stops);
        },
        hosts);
    gather_and_check(*group);
    group.reset();
    RANK_CHECK(multihost::end_all("tcp"));
  });
  await(words[stopped]);
  std::this_thread::sleep_for(6500ms);
  processes.signal(paused, SIGCONT);
  check_ended(processes.wait(90s));
}

/// Returns how many connections the process has that listens at the address ("127.0.0.1:PORT").
std::uint64_t connections_at(const std::string& address) {
  std::array<char, 8> port{};
  (void)std::snprintf(port.data(), port.size(), ":%04X", std::stoi(address.substr(address.rfind(':') + 1)));
  std::uint64_t count = 0;
  for (const char* const table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    std::string number;
    std::string local;
    std::string remote;
    std::string state;
    for (std::string line; std::getline(lines, line);)
      if (std::istringstream(line) >> number >> local >> remote >> state)
        count += local.ends_with(port.data()) && state == "01" ? 1 : 0;
  }
  return count;
}

}  // namespace

TEST_CASE("a rank 0 that is stopped for seconds after it listens meets the ranks of its host and of another one") {
  if (!can_imitate_hosts()) return;
  check_pause(0, 3, {0, 1, 1, 0});
}

TEST_CASE("a relay that is stopped for seconds after rank 0 has accepted it delays its ranks only") {
  if (!can_imitate_hosts()) return;
  check_pause(1, 3, {0, 1, 1, 1});
}

TEST_CASE("rank 0 has one connection per other host") {
  if (!can_imitate_hosts()) return;
  SharedWords words;
  const std::string address = free_local_address();
  const std::vector<int> hosts = {0, 1, 1, 0, 2, 2, 2};
  run_processes(static_cast<int>(hosts.size()), [&](int rank) {
    // The sockets that a rank makes after all have joined are for connections to other ranks. No rank leaves the
    // rendezvous meanwhile.
    const auto count = [&](int) {
      const std::uint64_t now = connections_at(address);
      std::uint64_t before = words[connections];
      while (before < now && !words[connections].compare_exchange_weak(before, now)) continue;
    };
    auto group = join_in_order(words, address, rank, 20s, count, hosts);
    gather_and_check(*group);
    group.reset();
    RANK_CHECK(multihost::end_all("tcp"));
  });
  // Without relays there would be five: one for each rank of the other hosts. On a busy machine a rank may find a name
  // that is claimed, but not open yet, and then connects itself.
  const std::uint64_t most = words[connections];
  CHECK(most >= 1);
  CHECK(most < 5);
}

TEST_CASE("a rank 0 that starts late meets a relay of its own host, and the ranks behind it") {
  const std::string address = free_local_address();
  run_processes(ranks, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(800ms);
    auto group = tcp_group({.address = address, .rank = rank, .size = ranks, .timeout = 20s, .key = "test"});
    gather_and_check(*group);
    group.reset();
    RANK_CHECK(multihost::end_all("tcp"));
  });
}

TEST_CASE("without rank 0, each rank behind a relay reports the address and the reason, and which rank has tried it") {
  const std::string address = free_local_address();
  run_processes(3, [&](int rank) {
    if (rank == 0) return;
    if (rank == 2) std::this_thread::sleep_for(200ms);
    const milliseconds deadline = rank == 2 ? 700ms : 2s;
    error_of(
        ErrorKind::timeout,
        {"rank " + std::to_string(rank) + " (host ", "could not reach rank 0 at " + address, "Connection refused",
         rank == 2 ? "tried by rank 1 (host " : "Check that rank 0 is running"},
        [&] { (void)tcp_group({.address = address, .rank = rank, .size = 3, .timeout = deadline, .key = "test"}); });
  });
}

TEST_CASE("the name of a relay that another user has taken keeps no rank out") {
  if (!can_imitate_hosts()) return;
  const std::string address = free_local_address();
  const std::string name = rendezvous::relay_name(rendezvous::token_of("muster tcp  test"), address);
  SharedWords words;
  run_processes(ranks + 1, [&](int rank) {
    if (rank == ranks) {
      enter_host(7);
      const os::Fd taken = os::listen_abstract(name);
      words[0] = 1;
      await(words[1]);
      return;
    }
    await(words[0]);
    auto group = tcp_group({.address = address, .rank = rank, .size = ranks, .timeout = 20s, .key = "test"});
    gather_and_check(*group);
    words[1] = 1;
    group.reset();
    RANK_CHECK(multihost::end_all("tcp"));
  });
}

TEST_CASE("a job that needs more open files than one rank may have is refused by all ranks at once") {
  if (!can_imitate_hosts()) return;
  const std::string address = free_local_address();
  run_processes(12, [&](int rank) {
    enter_host(rank / 4);
    // Enough for the rendezvous, but not for its connections in the group.
    if (rank == 7) limit_open_files(34, 34);
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of(
        ErrorKind::io, {"rank 7 (host ", "a group of 12 ranks on 3 hosts needs 42 more open files", "ulimit -n"},
        [&] { (void)tcp_group({.address = address, .rank = rank, .size = 12, .timeout = 20s, .key = "test"}); });
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 10s);
    if (error.rank() != 7 || error.os_error() != EMFILE) throw RankFailure(error.what());
  });
}

TEST_CASE("rank 0 that may open too few files for its hosts is the cause that all ranks throw, with the remedy") {
  if (!can_imitate_hosts()) return;
  const std::string address = free_local_address();
  run_processes(12, [&](int rank) {
    enter_host(rank);
    if (rank == 0) limit_open_files(8, 8);
    const Error error = error_of(ErrorKind::io, {"rank 0 (host ", "ulimit -n"}, [&] {
      (void)tcp_group({.address = address, .rank = rank, .size = 12, .timeout = 20s, .key = "test"});
    });
    if (error.rank() != 0 || error.os_error() != EMFILE) throw RankFailure(error.what());
  });
}

// SPDX-License-Identifier: Apache-2.0
// tcp_group() and world() over it: the rendezvous, its errors, unknown peers, and ranks that die alone on their host.

#include "muster/tcp.hpp"

#include <signal.h>
#include <sys/socket.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/log.hpp"
#include "muster/process_group.hpp"
#include "src/base/fixed_string.hpp"
#include "src/multihost/context.hpp"
#include "src/rendezvous/address_file.hpp"
#include "src/rendezvous/messages.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/imitated_hosts.hpp"
#include "tests/support/networks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/sandbox.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

/// Returns a port of 127.0.0.1 that was free a moment ago.
std::string free_address() {
  tcp::asio::io_context io;
  const tcp::Acceptor acceptor = tcp::listen_anywhere(io, tcp::asio::ip::address_v4::loopback());
  return tcp::text_of(acceptor.local_endpoint());
}

std::shared_ptr<Group> join(const std::string& address, int rank, int size, std::chrono::milliseconds timeout = 20s,
                            const std::string& key = "test") {
  return tcp_group({.address = address, .rank = rank, .size = size, .timeout = timeout, .key = key});
}

/// Runs ranks that all exit in order.
void end(std::shared_ptr<Group> group) {
  group.reset();
  RANK_CHECK(multihost::end_all("tcp"));
}

struct Caller {
  tcp::asio::io_context io;
  tcp::Socket socket{io};
  explicit Caller(const std::string& address, Clock::duration patience = 5s) {
    const auto until = Clock::now() + patience;
    for (tcp::error_code failure;;) {
      socket = tcp::Socket(io);
      socket.connect(*tcp::parse_endpoint(address), failure);
      if (!failure) return;
      if (Clock::now() > until) throw RankFailure("nobody listens at " + address);
      std::this_thread::sleep_for(5ms);
    }
  }
  void say(std::span<const std::byte> bytes) {
    tcp::error_code ignored;
    tcp::asio::write(socket, tcp::asio::buffer(bytes.data(), bytes.size()), ignored);
  }
};

}  // namespace

TEST_CASE("invalid addresses and ranks are refused at once") {
  for (const char* address : {"", "host", "host:", ":29500", "host:0", "host:99999", "host:x", "file://here",
                              "file:///", "tcp://", "tcp://host"})
    CHECK(error_of([&] { (void)join(address, 0, 2); }).kind() == ErrorKind::invalid_argument);
  CHECK(error_of([] { (void)join("h:1", 2, 2); }).kind() == ErrorKind::invalid_argument);
  CHECK(error_of([] { (void)join("h:1", -1, 2); }).kind() == ErrorKind::invalid_argument);
  CHECK(error_of([] { (void)join("h:1", 0, 0); }).kind() == ErrorKind::invalid_argument);
}

TEST_CASE("a port of another program, or of another host, is rank 0's error with the remedy") {
  tcp::asio::io_context io;
  const tcp::Acceptor other = tcp::listen_anywhere(io, tcp::asio::ip::address_v4::loopback());
  const std::string taken = tcp::text_of(other.local_endpoint());
  error_of(ErrorKind::io, {"listening at " + taken, "Choose a free port"}, [&] { (void)join(taken, 0, 2); });
  error_of(ErrorKind::io, {"listening at 203.0.113.1:29500"}, [] { (void)join("203.0.113.1:29500", 0, 2); });
}

TEST_CASE("a rank that finds no rank 0 reports at its deadline which addresses it tried, and the results") {
  const std::string address = free_address();
  error_of(
      ErrorKind::timeout,
      {"rank 1 (host ", "could not reach rank 0 at " + address, "Connection refused", "Check that rank 0 is running"},
      [&] { (void)join(address, 1, 2, 300ms); });
  error_of(ErrorKind::timeout, {"no.such.host.invalid", "has no known address"},
           [] { (void)join("no.such.host.invalid:29500", 1, 2, 300ms); });
  TemporaryDirectory directory;
  error_of(ErrorKind::timeout, {"has not written the file yet"},
           [&] { (void)join("file://" + directory.path().string() + "/meeting", 1, 2, 300ms); });
}

TEST_CASE("ranks that are missing at the deadline are named on all ranks that came") {
  const std::string address = free_address();
  run_processes(3, [&](int rank) {
    if (rank == 1) return;
    error_of(ErrorKind::timeout, {" at " + address + " for rank 1, rank 3 of 4 ranks", "Check that all ranks run"},
             [&] { (void)join(address, rank, 4, 600ms); });
  });
}

TEST_CASE("duplicate ranks, other sizes, and ranks out of range are named on all that came") {
  struct Way {
    int rank_of_2;
    int size_of_2;
    const char* words;
  };
  for (const Way& way : {Way{1, 3, "two processes are rank 1"}, Way{2, 4, "was started as one of 4 ranks"}}) {
    const std::string address = free_address();
    run_processes(3, [&](int rank) {
      if (rank == 2) std::this_thread::sleep_for(300ms);
      const Error error = error_of(ErrorKind::rank_mismatch, {way.words, "pid "}, [&] {
        (void)join(address, rank == 2 ? way.rank_of_2 : rank, rank == 2 ? way.size_of_2 : 3, 10s);
      });
    });
  }
}

TEST_CASE("another version, another byte order: an error that names it, on all ranks that came") {
  for (const bool is_turned : {false, true}) {
    const std::string address = free_address();
    run_processes(3, [&](int rank) {
      if (rank != 2) {
        error_of(ErrorKind::version,
                 {is_turned ? "byte order" : "rank 2 (host ", is_turned ? "host " : "runs Muster 9.8.7"},
                 [&] { (void)join(address, rank, 3, 10s); });
        return;
      }
      std::this_thread::sleep_for(300ms);
      rendezvous::Hello hello = rendezvous::own_hello(2, 3);
      put_text(hello.version, "9.8.7");
      // join() uses the same key for its token.
      hello.token = rendezvous::token_of("muster tcp  test");
      std::vector<std::byte> bytes =
          rendezvous::make_message(rendezvous::Word::hello, std::as_bytes(std::span(&hello, 1)))->bytes;
      if (is_turned)
        for (const auto& [begin, length] : {std::pair(0, 8), std::pair(8, 4), std::pair(12, 4), std::pair(16, 8)})
          std::reverse(bytes.begin() + begin, bytes.begin() + begin + length);
      Caller caller(address);
      caller.say(bytes);
      std::array<std::byte, sizeof(rendezvous::MessageHead)> head;
      tcp::error_code ignored;
      tcp::asio::read(caller.socket, tcp::asio::buffer(head), ignored);
    });
  }
}

TEST_CASE("unknown peers at the rendezvous are dropped, and a rank of another job waits for its own rank 0") {
  const std::string address = free_address();
  run_processes(4, [&](int rank) {
    if (rank == 3) {
      error_of(ErrorKind::timeout, {"rank 0 of another job"}, [&] { (void)join(address, 1, 3, 700ms, "another job"); });
      return;
    }
    std::vector<std::unique_ptr<Caller>> strangers;
    if (rank == 2) {
      const std::vector<std::byte> garbage(1000, std::byte{0x47});
      for (int i = 0; i < 140; ++i) strangers.push_back(std::make_unique<Caller>(address));
      for (int i = 0; i < 10; ++i) strangers[static_cast<std::size_t>(i)]->say(garbage);
      std::this_thread::sleep_for(1s);
    }
    const auto group = join(address, rank, 3);
    gather_and_check(*group);
    end(group);
  });
}

TEST_CASE("a soft limit of open files below the number of ranks is raised") {
  TemporaryDirectory directory;
  run_processes(24, [&](int rank) {
    limit_open_files(20, std::nullopt);
    const auto group = join("file://" + (directory / "place"), rank, 24, 60s);
    gather_and_check(*group);
    end(group);
  });
}

TEST_CASE("a shortage of open files on rank 0 is the cause that all ranks throw") {
  TemporaryDirectory directory;
  run_processes(12, [&](int rank) {
    if (rank == 0) limit_open_files(8, 8);
    const Error error = error_of([&] { (void)join("file://" + (directory / "place"), rank, 12, 20s); });
    if (error.rank() != 0 || error.os_error() != EMFILE || !says(error, "ulimit -n")) throw RankFailure(error.what());
  });
}

TEST_CASE("a rank whose sandbox forbids shared memory causes no delay, and the others share it") {
  TemporaryDirectory directory;
  run_processes(4, [&](int rank) {
    if (rank == 1) forbid_pidfd_open();
    const auto begin = Clock::now();
    const auto group = join("file://" + (directory / "place"), rank, 4, 60s);
    RANK_CHECK(Clock::now() - begin < 10s);
    RANK_CHECK(group->shares_memory((rank + 2) % 4) == (rank % 2 == 0));
    gather_and_check(*group);
    end(group);
  });
}

TEST_CASE("machines cloned from one snapshot are distinguished at once") {
  std::vector<os::Fd> networks;
  for (int host = 0; host < 2; ++host) networks.push_back(fresh_network());
  join_networks(networks);
  run_processes(4, [&](int rank) {
    enter_network(networks[static_cast<std::size_t>(rank / 2)]);
    const FailingCall same_number({.call = "stat", .path = "the network namespace", .error = 1});
    const auto begin = Clock::now();
    const auto group = join(network_address(0) + ":29500", rank, 4, 60s);
    RANK_CHECK(Clock::now() - begin < 10s);
    RANK_CHECK(group->shares_memory(rank ^ 1) && !group->shares_memory(rank ^ 2));
    gather_and_check(*group);
    end(group);
  });
}

TEST_CASE("rank 0 takes over a listening socket of its caller") {
  tcp::asio::io_context io;
  tcp::Acceptor acceptor = tcp::listen_anywhere(io, tcp::asio::ip::address_v4::loopback());
  const std::string address = tcp::text_of(acceptor.local_endpoint());
  const int listener = acceptor.release();
  run_processes(2, [&](int rank) {
    const auto group = tcp_group({.address = address,
                                  .rank = rank,
                                  .size = 2,
                                  .timeout = 20s,
                                  .key = "test",
                                  .listener = rank == 0 ? listener : -1});
    gather_and_check(*group);
    end(group);
  });
  ::close(listener);
  error_of(ErrorKind::invalid_argument, {"not a listening TCP socket"},
           [&] { (void)tcp_group({.address = address, .rank = 0, .size = 2, .key = "test", .listener = ::dup(1)}); });
}

TEST_CASE("another program that listens in place of rank 0 is reported as such") {
  tcp::asio::io_context io;
  tcp::Acceptor other = tcp::listen_anywhere(io, tcp::asio::ip::address_v4::loopback());
  const std::string address = tcp::text_of(other.local_endpoint());
  const os::Fd listener(other.release());
  // The program either reads without an answer, or answers with a length that rank 0 must not accept.
  const auto text = [](std::string_view words) { return std::string(words); };
  const auto head = [](std::uint64_t magic, std::uint32_t word, std::uint64_t bytes) {
    std::string whole(24, '\0');
    std::memcpy(whole.data(), &magic, 8);
    std::memcpy(whole.data() + 8, &word, 4);
    std::memcpy(whole.data() + 16, &bytes, 8);
    return whole + std::string(300, 'x');
  };
  for (const std::string& answer :
       {std::string(), text("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), text("short"),
        head(rendezvous::MessageHead::right_magic, 2, std::uint64_t{1} << 62U),
        head(rendezvous::MessageHead::right_magic, 6, UINT64_MAX), head(rendezvous::MessageHead::right_magic, 99, 8),
        head(0, 2, 256)}) {
    std::jthread stranger([&](const std::stop_token& stop) {
      std::vector<os::Fd> callers;
      while (!stop.stop_requested()) {
        pollfd caller{listener.get(), POLLIN, 0};
        if (::poll(&caller, 1, 20) == 0) continue;
        callers.emplace_back(::accept(listener.get(), nullptr, nullptr));
        (void)::send(callers.back().get(), answer.data(), answer.size(), MSG_NOSIGNAL);
      }
    });
    const Error error = error_of([&] { (void)join(address, 1, 2, 400ms); });
    CAPTURE(answer);
    CHECK_MESSAGE(error.kind() == ErrorKind::timeout, error.what());
    CHECK_MESSAGE(says(error, "as rank 0 of Muster"), error.what());
  }
}

TEST_CASE("a file of an earlier job misleads no rank, and the file is deleted when all ranks have met") {
  for (const char* left :
       {"", "garbage", "muster meeting 1\nnumber 0123456789abcdef0123456789abcdef\nat 127.0.0.1:1\n"}) {
    TemporaryDirectory directory;
    const std::string path = directory / "meeting";
    if (*left != 0) std::ofstream(path) << left;
    run_processes(3, [&](int rank) {
      // The other ranks find the old file first.
      if (rank == 0) std::this_thread::sleep_for(300ms);
      const auto group = join("file://" + path, rank, 3);
      gather_and_check(*group);
      RANK_CHECK(!std::filesystem::exists(path));
      end(group);
    });
  }
}

TEST_CASE("a file that names another job's rendezvous, which is not disturbed") {
  TemporaryDirectory directory;
  const std::string path = directory / "meeting";
  const std::string other = directory / "other";
  run_processes(4, [&](int rank) {
    const bool is_other = rank >= 2;
    if (rank == 0) {
      // The file has the same port, but another rendezvous ID.
      const auto until = Clock::now() + 5s;
      std::optional<tcp::PublishedAddress> there;
      while (!there && Clock::now() < until) there = tcp::read_published(other);
      RANK_CHECK(there.has_value());
      there->number.assign(32, '7');
      tcp::publish(path, *there);
      std::this_thread::sleep_for(300ms);
    }
    if (rank == 3) std::this_thread::sleep_for(600ms);
    const auto group = join("file://" + (is_other ? other : path), rank % 2, 2);
    gather_and_check(*group);
    end(group);
  });
  CHECK(std::filesystem::is_empty(directory.path()));
}

TEST_CASE("an answer that is longer than a piece reaches all ranks of a host") {
  // The records of all ranks have 40 KiB. Each host has 20 ranks, and the answer has three pieces.
  constexpr int ranks = 40;
  if (::geteuid() != 0) {
    MESSAGE("skipped: without root all ranks are on one host, which sends no answers");
    return;
  }
  const std::string address = free_address();
  run_processes(ranks, [&](int rank) {
    enter_host(rank % 2);
    const auto group = join(address, rank, ranks, 60s);
    RANK_CHECK(!group->shares_memory(rank ^ 1));
    for (int turn = 0; turn < 30; ++turn) {
      const std::vector<std::byte> mine(Group::max_record, static_cast<std::byte>(rank + turn));
      std::vector<std::byte> all(ranks * mine.size());
      group->all_gather(mine, all);
      for (std::size_t i = 0; i < all.size(); ++i)
        RANK_CHECK(all[i] == static_cast<std::byte>(static_cast<int>(i / mine.size()) + turn));
      group->barrier();
    }
    end(group);
  });
}

TEST_CASE("ranks of one host share memory, whichever way they have met") {
  const std::string address = free_address();
  run_processes(3, [&](int rank) {
    const auto group = join("tcp://" + address, rank, 3);
    RANK_CHECK(group->kind() == "tcp");
    RANK_CHECK(group->shares_memory((rank + 1) % 3));
    const Tensor mine = pattern(DType::u8, {100000}, 1);
    const auto all = get_tensors_parallel(mine, ranks_from(0, 3), *group);
    RANK_CHECK(all.report().route == Route::shm);
    const auto forced = get_tensors_parallel(mine, ranks_from(0, 3), *group, {.route = Route::tcp});
    RANK_CHECK(forced.report().network_bytes == (rank == 0 ? 200000 : 100000));
    RANK_CHECK(forced.explain().find("of them by TCP") != std::string::npos);
    end(group);
  });
}

namespace {

/// Returns the listening port of this process; 0 if it has none.
std::uint16_t listening_port() {
  for (int descriptor = 3; descriptor < 200; ++descriptor) {
    int listens = 0;
    socklen_t length = sizeof listens;
    sockaddr_in6 address{};
    socklen_t size = sizeof address;
    if (::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
    if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size) != 0) continue;
    if (address.sin6_family == AF_INET6 || address.sin6_family == AF_INET) return ntohs(address.sin6_port);
  }
  return 0;
}

/// Runs each rank on its own host.
void run_hosts(int count, const std::vector<int>& killed, const std::function<void(Group&)>& body) {
  std::vector<os::Fd> networks;
  for (int host = 0; host < count; ++host) networks.push_back(fresh_network());
  join_networks(networks);
  run_processes(count, killed, [&](int rank) {
    enter_network(networks[static_cast<std::size_t>(rank)]);
    const auto group = join(network_address(0) + ":29500", rank, count);
    body(*group);
    if (!group->error()) end(group);
  });
}

}  // namespace

TEST_CASE("a rank that dies alone on its host is named by all others within a second, whether it has forked or not") {
  for (const bool has_forked : {false, true}) {
    CAPTURE(has_forked);
    SharedWords words;
    run_hosts(3, {2}, [&](Group& group) {
      gather_and_check(group);
      if (group.rank() == 2) {
        // A child inherits the rank's connections. The other ranks must still detect its death.
        if (has_forked && ::fork() == 0) {
          ::sleep(4);
          ::_exit(0);
        }
        std::this_thread::sleep_for(50ms);
        words[0].store(static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()));
        ::raise(SIGKILL);
      }
      const Error error = error_of([&] {
        for (;;) group.barrier();
      });
      const auto late = Clock::now() - Clock::time_point(Clock::duration(static_cast<Clock::rep>(words[0].load())));
      if (error.rank() != 2 || !says(error, "rank 2 (host ") || error.kind() != ErrorKind::peer_lost)
        throw RankFailure(error.what());
      if (late > 1s) throw RankFailure("late: " + std::string(error.what()));
    });
  }
}

TEST_CASE("a failed group closes its connections, even if other ranks keep theirs open") {
  TemporaryDirectory directory;
  run_processes(2, [&](int rank) {
    const auto sockets = [] {
      std::size_t count = 0;
      for (const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code ignored;
        if (std::filesystem::read_symlink(one.path(), ignored).string().starts_with("socket:")) ++count;
      }
      return count;
    };
    const std::size_t before = sockets();
    auto group = join("file://" + (directory / "meeting"), rank, 2);
    RANK_CHECK(sockets() > before);
    const auto begin = Clock::now();
    group->abort(Error(ErrorKind::cancelled, "enough"));
    if (rank == 0) group.reset();
    while (rank == 0 && sockets() > before && Clock::now() - begin < 5s) {
      multihost::advance_endings("tcp");
      std::this_thread::sleep_for(1ms);
    }
    if (rank == 0) RANK_CHECK(sockets() == before);
    if (rank == 1) std::this_thread::sleep_until(begin + 4s);
  });
}

TEST_CASE("a rank that waits at its end in vain names the ranks that have not ended") {
  // The missing ranks, and the number of ranks. Rank 10 is not directly below rank 0 in the tree of ranks.
  const std::vector<std::pair<std::vector<int>, int>> cases{{{1, 2}, 3}, {{10}, 12}, {{4, 10, 11}, 12}};
  for (const auto& [missing, size] : cases) {
    CAPTURE(size);
    const std::string address = free_address();
    SharedWords words;
    run_processes(size, [&](int rank) {
      auto group = join(address, rank, size, 3s);
      const bool is_missing = std::ranges::find(missing, rank) != missing.end();
      const auto until = Clock::now() + 20s;
      while (is_missing && words[0].load() == 0 && Clock::now() < until) std::this_thread::sleep_for(1ms);
      std::string text;
      set_log_hook([&](LogLevel, std::string_view message) { text += message; });
      group.reset();
      multihost::end_all("tcp");
      set_log_hook({});
      if (rank != 0) return;
      words[0].store(1);
      // Of several missing ranks below one rank, one is named.
      for (int other = 1; other < size; ++other)
        RANK_CHECK((text.find("rank " + std::to_string(other) + " (host ") != std::string::npos) ==
                   (std::ranges::find(missing, other) != missing.end() && other != 11));
    });
  }
}

TEST_CASE("sent data arrives although the sender makes no call afterwards") {
  // Each length in turn: one packet, several packets, and a message in pieces.
  constexpr std::array<std::int64_t, 3> lengths{60'000, 250'000, 40'000'000};
  SharedWords words;
  run_hosts(2, {}, [&](Group& group) {
    ProcessGroup ranks(group);
    std::size_t word = 0;
    const auto check = [&](int sender, const std::function<void()>& call) {
      call();
      if (group.rank() != sender) words[word].store(1);
      // The sender makes no call while the data arrives.
      const auto until = Clock::now() + 10s;
      while (group.rank() == sender && words[word].load() == 0 && Clock::now() < until)
        std::this_thread::sleep_for(1ms);
      RANK_CHECK(words[word].load() == 1);
      ++word;
    };
    for (const std::int64_t length : lengths) {
      Tensor tensor = pattern(DType::u8, {length}, 3);
      check(0, [&] { ranks.broadcast(tensor, 0); });
      check(1, [&] { ranks.reduce(tensor, 0, ReduceOp::max); });
      check(0, [&] { group.rank() == 0 ? ranks.send(tensor, 1) : (void)ranks.recv(tensor, 0); });
      check(1, [&] {
        if (group.rank() == 1)
          ranks.isend(tensor, 0).get();
        else
          (void)ranks.recv(tensor, 1);
      });
      RANK_CHECK(is_pattern(tensor, DType::u8, {length}, 3));
    }
  });
}

TEST_CASE("unknown peers at the ports of working ranks disturb nothing") {
  run_hosts(2, {}, [](Group& group) {
    const std::string own = "127.0.0.1:" + std::to_string(listening_port());
    std::vector<std::unique_ptr<Caller>> strangers;
    const std::vector<std::byte> garbage(300, std::byte{0x55});
    for (int i = 0; i < 150; ++i) {
      strangers.push_back(std::make_unique<Caller>(network_address(group.rank()) + own.substr(own.find(':'))));
      if (i % 3 != 0) strangers.back()->say(garbage);
      if (i % 10 == 0) gather_and_check(group);
    }
  });
}

TEST_CASE("world() under torchrun's variables on two hosts uses TCP") {
  std::vector<os::Fd> networks;
  for (int host = 0; host < 2; ++host) networks.push_back(fresh_network());
  join_networks(networks);
  for (const bool is_by_hand : {false, true}) {
    CAPTURE(is_by_hand);
    run_processes(4, [&](int rank) {
      enter_network(networks[static_cast<std::size_t>(rank / 2)]);
      const Setting settings[] = {{"RANK", std::to_string(rank)},      {"WORLD_SIZE", "4"},
                                  {"MASTER_ADDR", network_address(0)}, {"MASTER_PORT", "29500"},
                                  {"TORCHELASTIC_RUN_ID", "17"},       {"MUSTER_TIMEOUT", "20"}};
      if (!is_by_hand) ::setenv("LOCAL_WORLD_SIZE", "2", 1);
      auto group = world();
      RANK_CHECK(group->kind() == "tcp" && group->rank() == rank && group->size() == 4);
      RANK_CHECK(group->shares_memory(rank ^ 1) && !group->shares_memory(rank ^ 2));
      gather_and_check(*group);
      set_world(nullptr);
      end(std::move(group));
    });
  }
}

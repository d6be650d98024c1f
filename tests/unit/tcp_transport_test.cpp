// SPDX-License-Identifier: Apache-2.0
// Two and three endpoints of the TCP transport in one process: delivery, order, limits on waiting bytes, and malformed
// frames.

#include "src/tcp/transport.hpp"

#include <cerrno>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>

#include "doctest/doctest.h"
#include "src/rendezvous/address_file.hpp"
#include "tests/support/failing_call.hpp"

using namespace muster;
using namespace muster::tcp;
using multihost::PendingTransfer;
using multihost::SendEnd;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((i * 7 + i / 251 + static_cast<std::size_t>(seed)) & 0xff);
  return bytes;
}

/// All endpoints of one job.
struct Ends {
  std::vector<std::shared_ptr<TcpTransport>> all;
  Addresses addresses;

  explicit Ends(int size) {
    std::vector<std::unique_ptr<asio::io_context>> loops;
    std::vector<Acceptor> acceptors;
    addresses.token.fill(std::byte{9});
    for (int rank = 0; rank < size; ++rank) {
      loops.push_back(std::make_unique<asio::io_context>(1));
      acceptors.push_back(listen_anywhere(*loops.back(), asio::ip::address_v4::loopback()));
      addresses.of_ranks.push_back(acceptors.back().local_endpoint());
    }
    for (int rank = 0; rank < size; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      all.push_back(std::make_shared<TcpTransport>(rank, addresses, std::move(loops[at]), std::move(acceptors[at])));
    }
  }
  TcpTransport& operator[](int rank) { return *all[static_cast<std::size_t>(rank)]; }
  /// Makes progress on all endpoints until `done` returns true.
  template <class Done>
  void until(const Done& done) {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (!done()) {
      for (const auto& one : all) (void)one->find(one->rank() == 0 ? 1 : 0, 999);
      REQUIRE(std::chrono::steady_clock::now() < deadline);
    }
  }
};

PendingTransfer send(TcpTransport& from, int to, int tag, const Bytes& bytes, SendEnd finished = SendEnd::sent) {
  return from.send_copy(to, tag, bytes, finished);
}

struct Received {
  std::shared_ptr<Bytes> bytes;
  PendingTransfer pending;
  Received(TcpTransport& to, int from, int tag, std::size_t size) : bytes(std::make_shared<Bytes>(size)) {
    pending = to.receive(from, tag, *bytes, bytes);
  }
};

std::string failure_words(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// A peer that connects to an endpoint over its own socket.
struct Stranger {
  asio::io_context io;
  Socket socket{io};
  explicit Stranger(const Endpoint& to) { socket.connect(to); }
  void say(const void* bytes, std::size_t size) {
    error_code ignored;
    asio::write(socket, asio::buffer(bytes, size), ignored);
  }
};

}  // namespace

TEST_CASE("messages of every size reach the receive of their tag, in order, whichever side is first") {
  for (const bool is_posted_first : {false, true}) {
    Ends ends(2);
    std::vector<Received> received;
    std::vector<PendingTransfer> sends;
    const std::vector<std::size_t> sizes = {0, 1, 255, 64 << 10, (64 << 10) + 1, 5 << 20, 3, 300 << 10, 0};
    const auto post = [&] {
      for (const int tag : {8, 7})
        for (const std::size_t size : sizes) received.emplace_back(ends[1], 0, tag, size);
    };
    if (is_posted_first) post();
    for (const int tag : {7, 8})
      for (const std::size_t size : sizes) sends.push_back(send(ends[0], 1, tag, pattern(size, tag)));
    if (!is_posted_first) post();
    ends.until([&] {
      std::erase_if(sends, [](PendingTransfer& one) { return one.test(); });
      return sends.empty() && std::ranges::all_of(received, [](Received& one) { return one.pending.test(); });
    });
    for (std::size_t i = 0; i < received.size(); ++i) {
      const int tag = i < sizes.size() ? 8 : 7;
      CHECK(*received[i].bytes == pattern(sizes[i % sizes.size()], tag));
    }
  }
}

TEST_CASE("both endpoints send to each other at once, large and small") {
  Ends ends(2);
  std::vector<Received> received;
  std::vector<PendingTransfer> sends;
  for (const int from : {0, 1})
    for (int i = 0; i < 40; ++i) {
      const std::size_t size = i % 5 == 0 ? 1 << 20 : 100;
      sends.push_back(send(ends[from], 1 - from, 5, pattern(size, i)));
      received.emplace_back(ends[1 - from], from, 5, size);
    }
  ends.until([&] {
    std::erase_if(sends, [](PendingTransfer& one) { return one.test(); });
    return sends.empty() && std::ranges::all_of(received, [](Received& one) { return one.pending.test(); });
  });
  for (int i = 0; i < 80; ++i)
    CHECK(*received[static_cast<std::size_t>(i)].bytes == pattern((i % 40) % 5 == 0 ? 1 << 20 : 100, i % 40));
}

TEST_CASE("unreceived messages wait at their sender beyond a limit, and are dropped when they are found and released") {
  Ends ends(2);
  std::vector<PendingTransfer> sends;
  constexpr int count = 40;
  for (int i = 0; i < count; ++i) sends.push_back(send(ends[0], 1, 5, pattern(60 << 10, i)));
  for (int turn = 0; turn < 200; ++turn) {
    for (PendingTransfer& one : sends) (void)one.test();
    (void)ends[1].find(0, 999);
  }
  const auto open = std::ranges::count_if(sends, &PendingTransfer::is_open);
  CHECK(open >= count - static_cast<int>(window / (60 << 10)) - 1);
  CHECK(open < count);
  // Only every second message is received.
  for (int i = 0; i < count; ++i) {
    std::unique_ptr<multihost::ArrivedMessage> found;
    ends.until([&] { return found || (found = ends[1].find(0, 5)); });
    CHECK(found->bytes() == 60 << 10);
    if (i % 2 == 0) continue;
    const auto place = std::make_shared<Bytes>(found->bytes());
    PendingTransfer pending = found->receive(*place, place);
    ends.until([&] {
      for (PendingTransfer& one : sends) (void)one.test();
      return pending.test();
    });
    CHECK(*place == pattern(60 << 10, i));
  }
  ends.until([&] { return std::ranges::all_of(sends, [](PendingTransfer& one) { return one.test(); }); });
}

TEST_CASE("a send in mode `taken` finishes when its message is received or dropped, and not before") {
  Ends ends(2);
  for (const std::size_t size : {std::size_t{10}, std::size_t{1} << 20}) {
    PendingTransfer taken = send(ends[0], 1, 5, pattern(size, 1), SendEnd::taken);
    PendingTransfer dropped = send(ends[0], 1, 6, pattern(size, 2), SendEnd::taken);
    for (int turn = 0; turn < 100; ++turn) {
      CHECK(!taken.test());
      CHECK(!dropped.test());
      (void)ends[1].find(0, 999);
    }
    Received received(ends[1], 0, 5, size);
    ends.until([&] { return ends[1].find(0, 6) != nullptr; });
    ends.until([&] { return received.pending.test() && taken.test() && dropped.test(); });
    CHECK(*received.bytes == pattern(size, 1));
  }
}

TEST_CASE("a receive from any rank takes the first message; a cancelled receive takes none") {
  Ends ends(3);
  Received anybody(ends[0], multihost::any_rank, 3, 4);
  Received another(ends[0], multihost::any_rank, 3, 4);
  another.pending.cancel();
  CHECK(!another.pending.is_open());
  PendingTransfer first = send(ends[2], 0, 3, pattern(4, 2));
  ends.until([&] { return anybody.pending.test() && first.test(); });
  CHECK(*anybody.bytes == pattern(4, 2));
  PendingTransfer second = send(ends[1], 0, 3, pattern(4, 1));
  std::unique_ptr<multihost::ArrivedMessage> found;
  ends.until([&] { return second.test() && (found || (found = ends[0].find_any())); });
  CHECK(found->tag() == 3);
}

TEST_CASE("an abandoned send of the caller's memory continues without that memory") {
  Ends ends(2);
  // More bytes than the turns below can send.
  constexpr std::size_t size = 64 << 20;
  Received before(ends[1], 0, 5, size);
  Received after(ends[1], 0, 5, 4);
  {
    const Bytes memory = pattern(size, 1);
    PendingTransfer send = ends[0].send(1, 5, memory, nullptr, SendEnd::sent);
    CHECK(send.borrows());
    for (int turn = 0; turn < 4; ++turn) {
      (void)ends[1].find(0, 999);
      (void)ends[0].find(1, 999);
    }
  }
  PendingTransfer next = send(ends[0], 1, 5, pattern(4, 3));
  ends.until([&] { return before.pending.test() && after.pending.test() && next.test(); });
  CHECK(before.bytes->back() == std::byte{0});
  CHECK(*after.bytes == pattern(4, 3));
}

TEST_CASE("a message that is longer than its receive is an error of that receive only") {
  for (const std::size_t size : {std::size_t{100}, std::size_t{1} << 20}) {
    Ends ends(2);
    Received small(ends[1], 0, 5, 10);
    Received well(ends[1], 0, 6, 10);
    PendingTransfer first = send(ends[0], 1, 5, pattern(size, 1));
    PendingTransfer second = send(ends[0], 1, 6, pattern(10, 2));
    std::string words;
    ends.until([&] {
      if (words.empty()) words = failure_words([&] { (void)small.pending.test(); });
      return well.pending.test() && second.test() && first.test() && !words.empty();
    });
    CHECK(words.find("at most 10 are expected") != std::string::npos);
    CHECK(*well.bytes == pattern(10, 2));
  }
}

TEST_CASE("messages that a rank sent before its end can be received; then it is lost, and reported once") {
  Ends ends(2);
  PendingTransfer last = send(ends[1], 0, 5, pattern(100, 1));
  PendingTransfer never = send(ends[0], 1, 5, pattern(1 << 20, 1));
  Received none(ends[0], 1, 6, 4);
  ends.until([&] { return last.test(); });
  ends.all[1].reset();
  ends.all.pop_back();
  std::string words;
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (words.empty() && std::chrono::steady_clock::now() < deadline)
    words = failure_words([&] { (void)none.pending.test(); });
  CHECK(words.find("TCP:") != std::string::npos);
  CHECK(!failure_words([&] { (void)never.test(); }).empty());
  CHECK(!failure_words([&] { (void)send(ends[0], 1, 5, {}); }).empty());
  CHECK(ends[0].next_lost() == 1);
  CHECK(ends[0].next_lost() == multihost::any_rank);
  const std::unique_ptr<multihost::ArrivedMessage> found = ends[0].find(1, 5);
  REQUIRE(found);
  const auto place = std::make_shared<Bytes>(100);
  CHECK(found->receive(*place, place).test());
  CHECK(*place == pattern(100, 1));
}

TEST_CASE("endpoints that close in order lose no message; the barrier and the exchange of texts complete") {
  Ends ends(11);
  std::vector<std::jthread> threads;
  std::vector<std::string> failures(11);
  for (int rank = 0; rank < 11; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const int mine = 100 + rank;
        const Bytes all = ends[rank].tell_all(std::as_bytes(std::span(&mine, 1)), 10s);
        for (int other = 0; other < 11; ++other) {
          int theirs = 0;
          std::memcpy(&theirs, all.data() + static_cast<std::size_t>(other) * sizeof theirs, sizeof theirs);
          if (theirs != 100 + other) throw Error(ErrorKind::corrupt, "other bytes");
        }
        for (int turn = 0; turn < 4; ++turn) ends[rank].barrier().wait(10s, "late");
        while (!ends[rank].close()) std::this_thread::yield();
        if (ends[rank].next_lost() != multihost::any_rank) throw Error(ErrorKind::peer_lost, "lost");
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  threads.clear();
  for (const std::string& failure : failures) CHECK(failure.empty());
}

TEST_CASE("a connection with a wrong hello is dropped, and does no harm") {
  Ends ends(2);
  std::vector<std::unique_ptr<Stranger>> strangers;
  const auto stranger = [&](const TcpHello& hello, std::size_t size = sizeof(TcpHello)) {
    strangers.push_back(std::make_unique<Stranger>(ends.addresses.of_ranks[1]));
    strangers.back()->say(&hello, size);
  };
  const Token& token = ends.addresses.token;
  stranger({.magic = 1, .from = 0, .to = 1, .token = token});
  stranger({.from = 0, .to = 1});
  stranger({.from = 0, .to = 0, .token = token});
  stranger({.from = 1, .to = 1, .token = token});
  stranger({.from = 2, .to = 1, .token = token});
  stranger({.from = -1, .to = 1, .token = token});
  stranger({.from = 0, .to = 1, .token = token}, 31);
  for (int i = 0; i < 100; ++i) strangers.push_back(std::make_unique<Stranger>(ends.addresses.of_ranks[1]));
  PendingTransfer well = send(ends[0], 1, 5, pattern(4, 1));
  Received received(ends[1], 0, 5, 4);
  ends.until([&] { return well.test() && received.pending.test(); });
  CHECK(ends[1].next_lost() == multihost::any_rank);
  for (int i = 0; i < 6; ++i) {
    char byte = 0;
    error_code failure;
    (void)asio::read(strangers[static_cast<std::size_t>(i)]->socket, asio::buffer(&byte, 1), failure);
    CHECK(failure);
  }
}

TEST_CASE("malformed frames make their sender a lost rank") {
  const Frame bad[] = {
      {.kind = static_cast<FrameKind>(99)},
      {.kind = FrameKind::message, .tag = -1},
      {.kind = FrameKind::message, .tag = 1, .bytes = most_at_once + 1},
      {.kind = FrameKind::offer, .tag = 1, .number = 1, .bytes = UINT64_MAX},
      {.kind = FrameKind::payload, .number = 77, .bytes = 8},
      {.kind = FrameKind::credit, .bytes = 8},
      {.kind = FrameKind::want, .number = 1},
  };
  for (const Frame& frame : bad) {
    CAPTURE(static_cast<int>(frame.kind));
    Ends ends(2);
    Stranger rank(ends.addresses.of_ranks[1]);
    const TcpHello hello{.from = 0, .to = 1, .token = ends.addresses.token};
    rank.say(&hello, sizeof hello);
    rank.say(&frame, sizeof frame);
    int lost = multihost::any_rank;
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (lost == multihost::any_rank && std::chrono::steady_clock::now() < deadline) {
      (void)failure_words([&] { (void)ends[1].find(0, 5); });
      lost = ends[1].next_lost();
    }
    CHECK(lost == 0);
  }
}

TEST_CASE("a receive from any rank survives a rank that dies in the middle of a message to it") {
  struct Cut {
    FrameKind kind;
    std::uint64_t bytes;  // announced bytes
    std::size_t sent;     // sent bytes of those
  };
  const Cut cuts[] = {{FrameKind::message, 4, 0}, {FrameKind::message, 4, 2}, {FrameKind::message, 9, 9},
                      {FrameKind::offer, 4, 0},   {FrameKind::offer, 4, 2},   {FrameKind::offer, 9, 0}};
  for (const Cut& cut : cuts)
    for (const bool is_posted_first : {false, true}) {
      CAPTURE(static_cast<int>(cut.kind));
      CAPTURE(cut.sent);
      Ends ends(3);
      const auto look = [&](int turns) {
        for (int turn = 0; turn < turns; ++turn) {
          (void)failure_words([&] { (void)ends[0].find(2, 999); });
          std::this_thread::sleep_for(1ms);
        }
      };
      std::optional<Received> inbox;
      if (is_posted_first) inbox.emplace(ends[0], multihost::any_rank, 3, 4);
      std::optional<Stranger> dying(std::in_place, ends.addresses.of_ranks[0]);
      const TcpHello hello{.from = 2, .to = 0, .token = ends.addresses.token};
      const Frame frame{.kind = cut.kind, .tag = 3, .number = 1, .bytes = cut.bytes};
      dying->say(&hello, sizeof hello);
      dying->say(&frame, sizeof frame);
      look(5);
      if (!is_posted_first) inbox.emplace(ends[0], multihost::any_rank, 3, 4);
      look(5);
      const Frame payload{.kind = FrameKind::payload, .tag = 3, .number = 1, .bytes = cut.bytes};
      if (cut.kind == FrameKind::offer && cut.sent != 0) dying->say(&payload, sizeof payload);
      dying->say(pattern(cut.sent, 7).data(), cut.sent);
      look(5);
      dying.reset();
      look(10);
      CHECK(ends[0].next_lost() == 2);
      CHECK(!inbox->pending.test());
      PendingTransfer message = send(ends[1], 0, 3, pattern(4, 1));
      ends.until([&] { return message.test() && inbox->pending.test(); });
      CHECK(*inbox->bytes == pattern(4, 1));
    }
}

TEST_CASE("a shortage of this process does not make the peer a lost rank") {
  for (const int shortage : {EMFILE, ENFILE, ENOBUFS, ENOMEM}) {
    Ends ends(2);
    {
      const test::FailingCall failing({.call = "socket", .path = "TCP", .error = shortage});
      try {
        (void)send(ends[0], 1, 5, pattern(4, 1));
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.os_error() == shortage);
      }
    }
    CHECK(ends[0].next_lost() == multihost::any_rank);
    Received received(ends[1], 0, 5, 4);
    PendingTransfer message = send(ends[0], 1, 5, pattern(4, 1));
    ends.until([&] { return message.test() && received.pending.test(); });
  }
}

TEST_CASE("without IPv6, a listener has a free port of IPv4") {
  asio::io_context io;
  // The first socket is one of IPv6.
  const test::FailingCall failing({.call = "socket", .error = EAFNOSUPPORT, .times = 1});
  const Acceptor acceptor = listen_anywhere(io, {});
  CHECK(acceptor.local_endpoint().address() == asio::ip::address_v4::any());
  CHECK(acceptor.local_endpoint().port() >= 1024);
}

TEST_CASE("messages beyond the window, which no rank sends, are not received") {
  Ends ends(2);
  Stranger rank(ends.addresses.of_ranks[1]);
  const TcpHello hello{.from = 0, .to = 1, .token = ends.addresses.token};
  rank.say(&hello, sizeof hello);
  std::jthread flood([&] {
    const Frame frame{.kind = FrameKind::message, .tag = 5, .bytes = most_at_once};
    const Bytes bytes(most_at_once);
    for (int i = 0; i < 1000; ++i) {
      rank.say(&frame, sizeof frame);
      rank.say(bytes.data(), bytes.size());
    }
  });
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  int lost = multihost::any_rank;
  while (lost == multihost::any_rank && std::chrono::steady_clock::now() < deadline) {
    (void)failure_words([&] { (void)ends[1].find(0, 6); });
    lost = ends[1].next_lost();
  }
  CHECK(lost == 0);
}

TEST_CASE("a published address is restored from its text, and no other text is accepted") {
  const PublishedAddress address{std::string(32, 'a'), {*parse_endpoint("10.0.0.1:4711"), *parse_endpoint("[::1]:1")}};
  const std::string text = text_of(address);
  const auto again = parse_published(text);
  REQUIRE(again);
  CHECK(text_of(*again) == text);
  for (std::size_t end = 0; end < text.size(); ++end) {
    const auto cut = parse_published(text.substr(0, end));
    CHECK((!cut || cut->endpoints.size() < address.endpoints.size()));
  }
  for (const char* bad : {"a", "muster meeting 2\n", "muster meeting 1\nnumber 12\nat 1.1.1.1:1\n"})
    CHECK(!parse_published(bad));
  for (const char* bad : {"", "host:1", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4:x", ":1"})
    CHECK(!parse_endpoint(bad));
}

// SPDX-License-Identifier: Apache-2.0
// Both ends of a trunk (src/rendezvous/relay.hpp) over a pair of sockets: the lines that it carries, and malformed
// messages.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "src/base/fixed_string.hpp"
#include "src/os/process.hpp"
#include "src/rendezvous/relay.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::rendezvous;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

std::array<std::unique_ptr<SocketLine>, 2> pair_of_lines() {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
  return {std::make_unique<SocketLine>(os::Fd(ends[0]), "one"), std::make_unique<SocketLine>(os::Fd(ends[1]), "other")};
}

template <class Body>
OutgoingPointer message_with(Word word, const Body& body) {
  return make_message(word, std::as_bytes(std::span(&body, 1)));
}

Hello hello_on_trunk(int rank) {
  Hello hello = own_hello(rank, 3);
  hello.token = token_of("trunk");
  return hello;
}

void carry_to(SocketLine& line, const std::vector<std::uint32_t>& numbers, const OutgoingPointer& message) {
  line.send(carrier_of(numbers, *message));
  line.send(message);
}

/// Waits for a message, which must arrive.
Message receive(Line& line, const MessageLimits& limits, std::chrono::milliseconds patience = 5s) {
  const auto until = Clock::now() + patience;
  while (Clock::now() < until) {
    SocketLine* const socket = &static_cast<LineOnSocket&>(line).carrier();
    wait_for_sockets(std::span(&socket, 1), {}, 20ms);
    if (auto message = line.next(limits)) return std::move(*message);
    if (line.end()) break;
  }
  throw RankFailure("no message has arrived");
}

void advance(Relay& relay) {
  std::vector<SocketLine*> sockets;
  std::vector<const os::Fd*> listeners;
  relay.add_to(sockets, listeners);
  wait_for_sockets(sockets, listeners, 20ms);
  relay.move();
}

constexpr MessageLimits from_known{.size = 3, .is_root = true, .is_known = true};

}  // namespace

TEST_CASE("rank 0 receives the lines of the ranks behind a relay, and sends one message to all of them at once") {
  auto [near, far] = pair_of_lines();
  const auto trunk = std::make_shared<Trunk>(std::move(near));
  TrunkLine relay(trunk);
  far->send(message_with(Word::hello, hello_on_trunk(1)));
  CHECK(receive(relay, {.size = 3, .is_root = true}).word == Word::hello);
  carry_to(*far, {5}, message_with(Word::hello, hello_on_trunk(2)));
  carry_to(*far, {5}, make_message(Word::part, std::array{std::byte{9}}));
  far->send(make_message(Word::part));
  CHECK(receive(relay, from_known).word == Word::part);
  auto branches = trunk->take_fresh();
  REQUIRE(branches.size() == 1);
  TrunkLine behind(trunk, branches.front());
  CHECK(behind.relay()->rank == 1);
  CHECK(relay.relay() == nullptr);
  CHECK(behind.next(from_known)->word == Word::hello);
  CHECK(behind.next(from_known)->body.size() == 1);
  CHECK(!behind.next(from_known));
  CHECK(!behind.end());

  trunk->send(std::array<std::uint32_t, 2>{0, 5}, make_message(Word::all, std::vector<std::byte>(100)));
  const Message all = receive(*far, {.size = 3, .is_trunk = true});
  CHECK(all.word == Word::through);
  CHECK(parse_carried(all.body, 2)->lines == std::vector<std::uint32_t>{0, 5});

  LineEnd ended{.line = 5};
  put_text(ended.words, "closed");
  far->send(message_with(Word::line_ended, ended));
  far->send(make_message(Word::late));
  CHECK(receive(relay, from_known).word == Word::late);
  CHECK(behind.end()->words == "closed");
  CHECK(behind.is_over());
  CHECK(!relay.end());
}

TEST_CASE("rank 0 blames the relay for each malformed message of its trunk") {
  const auto part = make_message(Word::part);
  const auto hello = message_with(Word::hello, hello_on_trunk(2));
  const std::vector<std::function<void(SocketLine&)>> ways = {
      [&](SocketLine& line) { carry_to(line, {7}, part); },   // it begins without a hello
      [&](SocketLine& line) { carry_to(line, {0}, hello); },  // the relay's own line
      [&](SocketLine& line) {
        carry_to(line, {7, 8}, hello);
      },  // two lines
      [&](SocketLine& line) { carry_to(line, {7}, make_message(Word::heard, std::vector<std::byte>(256))); },
      [&](SocketLine& line) {
        carry_to(line, {7}, hello);
        carry_to(line, {7}, hello);
      },
      [&](SocketLine& line) { line.send(message_with(Word::line_ended, LineEnd{.line = 7})); },
      [&](SocketLine& line) { line.send(make_message(Word::through, std::vector<std::byte>(40))); },
      [&](SocketLine& line) {
        for (std::uint32_t number = 1; number < 100; ++number) carry_to(line, {number}, hello);
      },
      [&](SocketLine& line) {
        for (std::uint32_t number = 1; number < 100; ++number) {
          carry_to(line, {number}, hello);
          line.send(message_with(Word::line_ended, LineEnd{.line = number}));
        }
      },
      [&](SocketLine& line) {
        carry_to(line, {7}, hello);
        for (int i = 0; i < 8; ++i) carry_to(line, {7}, part);
      },
  };
  for (std::size_t way = 0; way < ways.size(); ++way) {
    CAPTURE(way);
    auto [near, far] = pair_of_lines();
    TrunkLine relay(std::make_shared<Trunk>(std::move(near)));
    far->send(message_with(Word::hello, hello_on_trunk(1)));
    (void)receive(relay, {.size = 3, .is_root = true});
    ways[way](*far);
    CHECK_THROWS_AS((void)receive(relay, from_known), RankFailure);
    REQUIRE(relay.end());
    CHECK(relay.end()->is_garbage);
  }
}

TEST_CASE("rank 0 takes a limited number of messages of a trunk at once, and the others later") {
  auto [near, far] = pair_of_lines();
  TrunkLine relay(std::make_shared<Trunk>(std::move(near)));
  far->send(message_with(Word::hello, hello_on_trunk(1)));
  CHECK(receive(relay, {.size = 3, .is_root = true}).word == Word::hello);
  // One block of bytes, so that all of them fit into the buffers of the sockets.
  auto block = std::make_shared<OutgoingMessage>();
  const auto append = [&](const OutgoingPointer& message) {
    block->bytes.insert(block->bytes.end(), message->bytes.begin(), message->bytes.end());
  };
  for (std::uint32_t number = 1; number <= 60; ++number) {
    for (int i = 0; i < 6; ++i) {
      const auto message = i == 0 ? message_with(Word::hello, hello_on_trunk(2)) : make_message(Word::part);
      append(carrier_of(std::span(&number, 1), *message));
      append(message);
    }
  }
  append(make_message(Word::late));
  far->send(block);
  REQUIRE(far->is_drained());
  SocketLine* const socket = &relay.carrier();
  wait_for_sockets(std::span(&socket, 1), {}, 1s);
  CHECK(!relay.next(from_known));
  CHECK(!relay.end());
  CHECK(relay.trunk().take_fresh().size() < 60);
  CHECK(receive(relay, from_known).word == Word::late);
}

TEST_CASE("a relay waits at its end for a rank that still receives") {
  constexpr int size = 600;
  Hello own = own_hello(1, size);
  own.token = token_of("trunk");
  const std::string name = relay_name(token_of(unique_key()), "here");
  auto relay = std::make_unique<Relay>(os::listen_abstract(name), own);
  auto [near, far] = pair_of_lines();
  auto trunk = relay->make_trunk(std::move(near), {});
  SocketLine behind(std::move(*os::connect_abstract(name)), "relay");
  behind.send(message_with(Word::hello, own));
  advance(*relay);
  far->send(message_with(Word::heard, own));
  CHECK(receive(*trunk, {.size = size}).word == Word::heard);
  const std::vector<std::byte> parts(std::size_t{size} * longest_part);
  std::jthread rank_0(
      [&root = *far, all = make_message(Word::all, parts), number = std::array<std::uint32_t, 2>{0, 1}] {
        carry_to(root, {number.begin(), number.end()}, all);
        while (!root.is_drained() && !root.end()) {
          SocketLine* const socket = &root;
          wait_for_sockets(std::span(&socket, 1), {}, 20ms);
          root.move();
        }
      });
  CHECK(receive(*trunk, {.size = size}, 20s).body.size() == parts.size());
  rank_0.join();
  trunk.reset();
  // This rank needs more than two seconds, but never pauses for long.
  std::size_t received = 0;
  std::jthread slow([&] {
    while (!behind.end() && received == 0) {
      std::this_thread::sleep_for(200ms);
      SocketLine* const socket = &behind;
      wait_for_sockets(std::span(&socket, 1), {}, 0ms);
      while (const auto message = behind.next({.size = size}))
        if (message->word == Word::all) received = message->body.size();
    }
  });
  relay.reset();
  slow.join();
  CHECK(received == parts.size());
}

TEST_CASE("a relay passes messages in both directions, and blames rank 0 for a malformed one") {
  const std::string name = relay_name(token_of(unique_key()), "here");
  Relay relay(os::listen_abstract(name), hello_on_trunk(1));
  auto [near, far] = pair_of_lines();
  const auto trunk = relay.make_trunk(std::move(near), {});
  auto socket = os::connect_abstract(name);
  REQUIRE(socket);
  RelayNews news;
  LineToRelay behind(std::make_unique<SocketLine>(std::move(*socket), "relay"), news);
  behind.send(message_with(Word::hello, hello_on_trunk(2)));
  advance(relay);
  relay.tell_reason("no answer");
  RelayCard card = body_of<RelayCard>(receive(behind, {.size = 3}));
  CHECK(card.relay.rank == 1);
  CHECK(get_text(card.reason).empty());
  CHECK(get_text(body_of<RelayCard>(receive(behind, {.size = 3})).reason) == "no answer");

  // Rank 0 accepts the relay, and then the rank behind it.
  far->send(message_with(Word::heard, hello_on_trunk(0)));
  CHECK(receive(*trunk, {.size = 3}).word == Word::heard);
  const Message opened = receive(*far, {.size = 3, .is_root = true, .is_known = true, .is_trunk = true});
  const auto carried = parse_carried(opened.body, 1);
  REQUIRE(carried);
  const std::vector<std::uint32_t> line = carried->lines;
  CHECK(parse_whole(carried->bytes, {.size = 3, .is_root = true})->word == Word::hello);
  carry_to(*far, line, message_with(Word::heard, hello_on_trunk(0)));
  carry_to(*far, {0, line.front(), 77}, make_message(Word::all, std::vector<std::byte>(100)));
  CHECK(receive(*trunk, {.size = 3}).word == Word::all);
  Message next = receive(behind, {.size = 3});
  while (next.word == Word::relay_card) next = receive(behind, {.size = 3});
  CHECK(next.word == Word::heard);
  CHECK(receive(behind, {.size = 3}).word == Word::all);

  behind.send(make_message(Word::part));
  advance(relay);
  const Message part = receive(*far, {.size = 3, .is_root = true, .is_known = true, .is_trunk = true});
  CHECK(parse_whole(parse_carried(part.body, 1)->bytes, from_known)->word == Word::part);

  far->send(make_message(Word::through, std::vector<std::byte>(40)));
  CHECK_THROWS_AS((void)receive(*trunk, {.size = 3}), RankFailure);
  REQUIRE(trunk->end());
  CHECK(trunk->end()->is_garbage);
}

TEST_CASE("a relay does not pass the hello of a rank on that has ended before") {
  // The rank may have joined in another way, or may start again.
  const std::string name = relay_name(token_of(unique_key()), "here");
  Relay relay(os::listen_abstract(name), hello_on_trunk(1));
  auto [near, far] = pair_of_lines();
  const auto trunk = relay.make_trunk(std::move(near), {});
  const auto join = [&] {
    auto line = std::make_unique<SocketLine>(std::move(*os::connect_abstract(name)), "relay");
    line->send(message_with(Word::hello, hello_on_trunk(2)));
    return line;
  };
  join();
  advance(relay);
  const auto before = join();
  advance(relay);
  far->send(message_with(Word::heard, hello_on_trunk(0)));
  (void)receive(*trunk, {.size = 3});
  join();
  advance(relay);
  const MessageLimits limits{.size = 3, .is_root = true, .is_known = true, .is_trunk = true};
  CHECK(receive(*far, limits).word == Word::through);
  CHECK_THROWS_AS((void)receive(*far, limits, 200ms), RankFailure);
}

TEST_CASE("a relay without a descriptor for one of two ranks keeps the first, and the other can be a relay") {
  const std::string name = relay_name(token_of(unique_key()), "here");
  Relay relay(os::listen_abstract(name), hello_on_trunk(1));
  auto [near, far] = pair_of_lines();
  const auto trunk = relay.make_trunk(std::move(near), {});
  far->send(message_with(Word::heard, hello_on_trunk(0)));
  (void)receive(*trunk, {.size = 3});
  SocketLine first(std::move(*os::connect_abstract(name)), "relay");
  SocketLine second(std::move(*os::connect_abstract(name)), "relay");
  for (SocketLine* const line : {&first, &second}) line->send(message_with(Word::hello, hello_on_trunk(2)));
  {
    const FailingCall shortage({.call = "accept", .path = "a rank's socket", .error = EMFILE, .after = 1});
    advance(relay);
  }
  CHECK(receive(first, {.size = 3}).word == Word::relay_card);
  CHECK_THROWS_AS((void)receive(second, {.size = 3}), RankFailure);
  CHECK(second.end());
  CHECK(os::listen_abstract(name));
}

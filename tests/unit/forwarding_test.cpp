// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/forwarding.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "muster/error.hpp"

using namespace muster;
using multihost::Forwarding;
using multihost::Hosts;

namespace {

/// The forwarding of all ranks of some hosts, in this process.
class Network {
 public:
  explicit Network(const std::vector<int>& ranks_of_hosts) {
    for (std::size_t host = 0; host < ranks_of_hosts.size(); ++host)
      for (int i = 0; i < ranks_of_hosts[host]; ++i) keys_.push_back(static_cast<int>(host));
    others_.resize(keys_.size());
    for (int rank = 0; rank < size(); ++rank)
      all_.push_back(std::make_unique<Forwarding>(
          std::make_shared<const Hosts>(keys_, rank), rank,
          [this, rank](int next, const group::PacketHead&, std::span<const std::byte> packet) {
            if (is_full) return false;
            packets[{rank, next}].emplace_back(packet.begin(), packet.end());
            if (host_of(rank) != host_of(next)) others_[static_cast<std::size_t>(rank)].insert(next);
            return true;
          },
          [this, rank](int from, const group::PacketPlace& place) {
            auto& waiting = packets[{from, rank}];
            if (waiting.empty()) return false;
            std::ranges::copy(waiting.front(), place({}, waiting.front().size()).begin());
            waiting.pop_front();
            return true;
          }));
  }
  [[nodiscard]] int size() const { return static_cast<int>(keys_.size()); }
  [[nodiscard]] int host_of(int rank) const { return keys_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Forwarding& of(int rank) { return *all_[static_cast<std::size_t>(rank)]; }
  /// Moves the only packet in the network one step further from `at`. Returns the rank that has received it.
  int step(int at) {
    const auto sent = std::ranges::find_if(
        packets, [&](const auto& entry) { return entry.first.first == at && !entry.second.empty(); });
    REQUIRE(sent != packets.end());
    const int next = sent->first.second;
    of(next).collect(at);
    of(next).pass_on();
    return next;
  }
  /// Returns the number of ranks of other hosts to which this rank has sent packets.
  [[nodiscard]] std::size_t others(int rank) const { return others_[static_cast<std::size_t>(rank)].size(); }

  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> packets;  // by the two ends of a step
  bool is_full = false;                                                       // no rank can send

 private:
  std::vector<int> keys_;
  std::vector<std::set<int>> others_;
  std::vector<std::unique_ptr<Forwarding>> all_;
};

}  // namespace

TEST_CASE("a packet takes at most three steps, and a rank sends to few ranks of other hosts") {
  for (const std::vector<int>& sizes : {std::vector<int>{40, 40}, {8, 8, 8, 8, 8, 8}, {1, 60, 7}, std::vector(50, 4)}) {
    Network network(sizes);
    for (int from = 0; from < network.size(); ++from)
      for (int to = 0; to < network.size(); ++to) {
        if (from == to) continue;
        const std::byte mark{static_cast<unsigned char>(from * 7 + to)};
        REQUIRE(network.of(from).send(to, {}, std::span(&mark, 1)));
        int steps = 1;
        for (int at = network.step(from); at != to; at = network.step(at)) REQUIRE(++steps <= 3);
        std::vector<int> senders;
        network.of(to).append_senders(senders);
        REQUIRE(senders == std::vector<int>{from});
        std::byte found{};
        REQUIRE(network.of(to).receive(from, [&](const auto&, std::size_t) { return std::span(&found, 1); }));
        REQUIRE(found == mark);
      }
    if (std::ranges::adjacent_find(sizes, std::not_equal_to<>()) != sizes.end()) continue;
    const std::size_t most = sizes.size() / static_cast<std::size_t>(sizes.front()) + 2;
    for (int rank = 0; rank < network.size(); ++rank) CHECK(network.others(rank) <= most);
  }
}

TEST_CASE("a gateway keeps packets that it cannot send, in order, and then receives none from its own host") {
  Network network({2, 2});
  // These packets pass through ranks 0 and 2.
  constexpr int from = 1;
  constexpr int to = 3;
  const auto send = [&](std::size_t bytes, unsigned char mark) {
    const std::vector<std::byte> packet(bytes, std::byte{mark});
    REQUIRE(network.of(from).send(to, {}, packet));
  };
  for (unsigned char mark = 0; mark < 20; ++mark) send(1 << 20, mark);
  network.is_full = true;
  network.of(0).collect(from);
  CHECK(!network.of(0).pass_on());
  // It keeps 16 MiB.
  CHECK(network.packets[{from, 0}].size() == 4);
  network.of(0).collect(from);
  CHECK(network.packets[{from, 0}].size() == 4);
  network.is_full = false;
  CHECK(network.of(0).pass_on());
  network.of(0).collect(from);
  CHECK(network.of(0).pass_on());
  CHECK(!network.of(0).pass_on());
  const int gateway = network.step(0);
  if (gateway != to) network.step(gateway);
  for (unsigned char mark = 0; mark < 20; ++mark) {
    std::vector<std::byte> found(1 << 20);
    REQUIRE(network.of(to).receive(from, [&](const auto&, std::size_t) { return std::span(found); }));
    CHECK(found == std::vector<std::byte>(1 << 20, std::byte{mark}));
  }
  CHECK(!network.of(to).receive(from, [](const auto&, std::size_t) { return std::span<std::byte>(); }));
}

TEST_CASE("packets are forwarded only if many ranks are on other hosts") {
  const auto is_useful = [](const std::vector<int>& keys, int self) {
    return Forwarding::is_useful(Hosts(std::span(keys), self));
  };
  CHECK(!is_useful(std::vector(100, 0), 3));
  const std::size_t most = Forwarding::most_direct;
  std::vector<int> keys(most, 0);
  keys.insert(keys.end(), most, 1);
  CHECK(!is_useful(keys, 0));
  // All hosts agree, although one of them has few ranks of other hosts.
  keys.push_back(2);
  CHECK(is_useful(keys, 0));
  CHECK(is_useful(keys, static_cast<int>(keys.size()) - 1));
}

TEST_CASE("a packet whose route does not contain a rank is refused by it") {
  Network network({20, 20, 20});
  struct Case {
    int previous, self;
    Forwarding::Route route;
  };
  const Case cases[] = {
      {1, 2, {1, -1}},    // no such rank
      {1, 2, {60, 2}},    //
      {1, 2, {1, 1}},     // from a rank to itself
      {1, 2, {2, 30}},    // from the receiver
      {1, 2, {3, 30}},    // from another rank of this host, which would have sent it itself
      {30, 2, {30, 50}},  // a rank of another host may only send packets for this host
  };
  for (const Case& one : cases) {
    CAPTURE(one.route.from);
    CAPTURE(one.route.to);
    std::vector<std::byte> bytes(sizeof one.route);
    std::memcpy(bytes.data(), &one.route, sizeof one.route);
    network.packets[{one.previous, one.self}] = {bytes};
    CHECK_THROWS_AS(network.of(one.self).collect(one.previous), Error);
  }
  network.packets[{1, 2}] = {std::vector<std::byte>(sizeof(Forwarding::Route) - 1)};
  CHECK_THROWS_AS(network.of(2).collect(1), Error);
}

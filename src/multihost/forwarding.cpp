// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/forwarding.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::multihost {
namespace {

/// A collection receives at most this many packets from each rank, so that it ends.
constexpr int most_packets = 64;
/// A gateway that keeps this many bytes for other hosts receives no more from its own host.
constexpr std::uint64_t most_leaving = 16 << 20;

std::size_t ranks_of_smallest(const Hosts& hosts) {
  return std::ranges::min(hosts.members, {}, &std::vector<int>::size).size();
}

}  // namespace

// Two connections to each of 96 ranks, and those of the group, are possible with 256 open files. Forwarding adds
// copies: docs/explanation/cost-model.md has the cost.
std::size_t Forwarding::most_direct = 96;

Forwarding::Forwarding(std::shared_ptr<const Hosts> hosts, int self, Send send, Receive receive)
    : hosts_(std::move(hosts)),
      self_(self),
      // With fewer hosts than ranks per host, some ranks would have no work.
      gateways_(static_cast<int>(std::max<std::size_t>(1, ranks_of_smallest(*hosts_) / (hosts_->members.size() - 1)))),
      send_(std::move(send)),
      receive_(std::move(receive)) {}

bool Forwarding::is_useful(const Hosts& hosts) {
  // All hosts must come to the same result, although they differ in the number of ranks elsewhere.
  return hosts.host_of.size() - ranks_of_smallest(hosts) > most_direct;
}

int Forwarding::gateway(int host, int other, Route route) const {
  const std::vector<int>& ranks = hosts_->on(host);
  const int first = (other < host ? other : other - 1) * gateways_;
  return ranks[static_cast<std::size_t>(first + (route.from + route.to) % gateways_) % ranks.size()];
}

int Forwarding::next_on(Route route) const {
  if (hosts_->is_here(route.to)) return route.to;
  const int other = host_of(route.to);
  const int own = gateway(hosts_->mine, other, route);
  return own == self_ ? gateway(other, hosts_->mine, route) : own;
}

bool Forwarding::send(int to, const group::PacketHead& head, std::span<const std::byte> packet) {
  const Route route{self_, to};
  std::vector<std::byte> bytes(sizeof route + packet.size());
  std::memcpy(bytes.data(), &route, sizeof route);
  if (!packet.empty()) std::memcpy(bytes.data() + sizeof route, packet.data(), packet.size());
  return send_(next_on(route), head, bytes);
}

Forwarding::Route Forwarding::route_of(const Packet& packet, int previous) const {
  Route route;
  const auto ranks = static_cast<std::int32_t>(hosts_->host_of.size());
  const auto is_rank = [&](std::int32_t rank) { return rank >= 0 && rank < ranks; };
  const bool is_whole = packet.bytes.size() >= sizeof route;
  if (is_whole) std::memcpy(&route, packet.bytes.data(), sizeof route);
  // A rank of this host sends its own packets, or those of another host to this rank.
  if (!is_whole || !is_rank(route.from) || !is_rank(route.to) || route.from == route.to || route.from == self_ ||
      (hosts_->is_here(previous) ? route.from != previous && route.to != self_ : !hosts_->is_here(route.to)))
    throw Error(ErrorKind::corrupt, fmt::format("malformed message: a packet that rank {} should not receive", self_));
  return route;
}

void Forwarding::collect(int previous) {
  for (int packets = 0; packets < most_packets; ++packets) {
    if (hosts_->is_here(previous) && leaving_ >= most_leaving) return;
    Packet packet;
    const auto place = [&](const group::PacketHead& head, std::size_t bytes) {
      packet.head = head;
      packet.bytes.resize(bytes);
      return std::span(packet.bytes);
    };
    if (!receive_(previous, place)) return;
    const Route route = route_of(packet, previous);
    if (route.to == self_) {
      arrived_[route.from].push_back(std::move(packet));
      continue;
    }
    const int next = next_on(route);
    if (!hosts_->is_here(next)) leaving_ += packet.bytes.size();
    passing_[next].push_back(std::move(packet));
  }
}

bool Forwarding::pass_on() {
  bool has_moved = false;
  for (auto& [next, packets] : passing_)
    while (!packets.empty() && send_(next, packets.front().head, packets.front().bytes)) {
      if (!hosts_->is_here(next)) leaving_ -= packets.front().bytes.size();
      packets.pop_front();
      has_moved = true;
    }
  return has_moved;
}

void Forwarding::append_senders(std::vector<int>& from) const {
  for (const auto& [rank, packets] : arrived_)
    if (!packets.empty()) from.push_back(rank);
}

bool Forwarding::receive(int from, const group::PacketPlace& place) {
  const auto found = arrived_.find(from);
  if (found == arrived_.end() || found->second.empty()) return false;
  const Packet packet = std::move(found->second.front());
  found->second.pop_front();
  const auto bytes = std::span(packet.bytes).subspan(sizeof(Route));
  const std::span<std::byte> room = place(packet.head, bytes.size());
  if (!bytes.empty()) std::memcpy(room.data(), bytes.data(), bytes.size());
  return true;
}

}  // namespace muster::multihost

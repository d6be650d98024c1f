// SPDX-License-Identifier: Apache-2.0
#pragma once
// Forwarding: the packets of two ranks on different hosts pass through one gateway on each of these hosts. So a rank
// has connections to few ranks, although it exchanges packets with all.
//
//  1. The sender passes the packet to the gateway of its own host towards the other host, through shared memory.
//  2. That gateway sends it to the gateway of the other host towards this host, over the transport.
//  3. The second gateway passes it to the receiver, through shared memory.
// A step whose two ends are the same rank does not take place. The ranks of a host divide the work of gateways evenly:
// of H hosts with R ranks each, a rank has connections to about H/R ranks of other hosts, but at least to one.
//
// All packets between two ranks take the same route, and no step changes their order.
//
// A gateway forwards packets whenever it waits inside the library. It keeps those that the next step has no room for.
// If it keeps too many for other hosts, it receives none from its own host until the transport has taken some. It
// always receives from other hosts, so no two gateways wait for each other. The protocol that sends the packets bounds
// the number of those that their receivers have not taken.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "src/group/group.hpp"
#include "src/multihost/hosts.hpp"

namespace muster::multihost {

/// The packets that one rank sends, forwards and receives. Used by the thread that holds the group.
class Forwarding {
 public:
  /// Precedes the contents of each packet.
  struct Route {
    std::int32_t from = 0;
    std::int32_t to = 0;
  };
  /// Sends a packet to the next rank of its route. Returns false if there is no room for it now.
  using Send = std::function<bool(int next, const group::PacketHead& head, std::span<const std::byte> packet)>;
  /// Receives the next packet from a rank if one has arrived; returns false if not.
  using Receive = std::function<bool(int from, const group::PacketPlace& place)>;

  Forwarding(std::shared_ptr<const Hosts> hosts, int self, Send send, Receive receive);

  /// If at most this many ranks are on other hosts, packets go directly to their receivers. Tests reduce the number.
  static std::size_t most_direct;
  /// Returns whether so many ranks are on other hosts that packets should be forwarded.
  [[nodiscard]] static bool is_useful(const Hosts& hosts);

  /// Begins to send a packet. Returns false if there is no room for it now.
  bool send(int to, const group::PacketHead& head, std::span<const std::byte> packet);
  /// Receives packets that have arrived from the previous rank of their route. Throws Error(corrupt) if the
  /// route of a packet does not contain this rank.
  void collect(int previous);
  /// Forwards packets for other ranks. Returns whether it has forwarded any.
  bool pass_on();
  /// Appends the ranks whose packets for this rank have arrived.
  void append_senders(std::vector<int>& from) const;
  /// Receives the next packet of a rank if one has arrived; returns false if not.
  bool receive(int from, const group::PacketPlace& place);

 private:
  struct Packet {
    group::PacketHead head{};
    std::vector<std::byte> bytes;  // with the route
  };
  /// Returns the rank of `host` that exchanges the packets on this route with the host `other`.
  [[nodiscard]] int gateway(int host, int other, Route route) const;
  [[nodiscard]] int next_on(Route route) const;
  [[nodiscard]] int host_of(int rank) const { return hosts_->host_of[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Route route_of(const Packet& packet, int previous) const;

  std::shared_ptr<const Hosts> hosts_;
  int self_;
  int gateways_;  // the number of gateways that a host has towards each other host
  Send send_;
  Receive receive_;
  std::map<int, std::deque<Packet>> arrived_;  // for this rank, by sender
  std::uint64_t leaving_ = 0;                  // the bytes of packets for other hosts in `passing_`
  std::map<int, std::deque<Packet>> passing_;  // for other ranks, by the next rank
};

}  // namespace muster::multihost

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which ranks share memory: found by trying, not by host name.
//
//  1. Every rank tells all others who it is: its version of Muster, its kernel's boot, its network namespace, its user,
//     and whether something keeps it from sharing memory. Meanwhile it holds a socket's name that only its network
//     namespace sees. Ranks that have boot, namespace and user in common could share memory.
//  2. Two virtual machines that were cloned from one snapshot have all of that in common. So every rank looks whose
//  names
//     it sees, and tells the first of those ranks: ranks with the same first one are on one host.
//  3. The ranks of a host meet as a local group. This takes seconds at most, because all of them are known to be there.
//  4. All tell each other how that went. If a rank has failed, each rank of its host counts as a host of its own.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/hosts/transport.hpp"
#include "src/sync/group.hpp"

namespace muster::hosts {

struct Hosts {
  std::vector<std::vector<int>> members;  ///< of each host, ascending; hosts in the order of their first rank
  std::vector<int> host_of;               ///< of each rank
  std::vector<int> place_of;              ///< of each rank among its host's
  int mine = 0;
  std::shared_ptr<SyncGroup> local;  ///< of the ranks of this host, in their order

  Hosts() = default;
  /// Of ranks 0, 1, ...: those that have a key in common are on one host. `self`: this rank.
  Hosts(std::span<const int> keys, int self);
  [[nodiscard]] const std::vector<int>& on(int host) const { return members[static_cast<std::size_t>(host)]; }
  [[nodiscard]] const std::vector<int>& here() const { return on(mine); }
  [[nodiscard]] int leader(int host) const { return on(host).front(); }
  [[nodiscard]] bool is_here(int rank) const { return host_of[static_cast<std::size_t>(rank)] == mine; }
};

/// The tree that the records of a round, and messages about failures, go up and down by. With one hub for all hosts it
/// would send all records as often as there are hosts: 268 MB a round for 4,096 ranks on 512 hosts. With few hosts the
/// tree is that hub. Of hosts 0 to `hosts` - 1; host 0 is its root, and each has at most most_children right below it.
struct HostTree {
  static constexpr int most_children = 8;

  int hosts = 1;

  /// -1 of the root.
  [[nodiscard]] int parent(int host) const noexcept { return host == 0 ? -1 : (host - 1) / most_children; }
  /// Right below, ascending.
  [[nodiscard]] std::vector<int> children(int host) const {
    std::vector<int> all;
    const int first = host * most_children + 1;
    for (int child = first; child < std::min(first + most_children, hosts); ++child) all.push_back(child);
    return all;
  }
  /// The host itself and all below it: each before its children, and they with all of theirs in order.
  [[nodiscard]] std::vector<int> with_all_below(int host) const {
    std::vector<int> all{host};
    for (const int child : children(host)) {
      const std::vector<int> below = with_all_below(child);
      all.insert(all.end(), below.begin(), below.end());
    }
    return all;
  }
  /// Steps to the root.
  [[nodiscard]] int depth(int host) const noexcept {
    int steps = 0;
    for (int at = host; at != 0; at = parent(at)) ++steps;
    return steps;
  }
  /// Steps to the farthest host below.
  [[nodiscard]] int height(int host) const noexcept {
    int steps = 0;
    // Its first child is nowhere nearer to the end than the others.
    for (int at = host * most_children + 1; at < hosts; at = at * most_children + 1) ++steps;
    return steps;
  }
};

/// What every rank knows of every other after the meeting.
struct Met {
  std::vector<RankInfo> ranks;
  SyncGroup::Nonce nonce{};  ///< rank 0's
  Hosts hosts;
};

/// Who a rank is. Its beginning stays the same in all versions.
struct Card {
  static constexpr std::uint32_t right_magic = 0x4d4d5049;
  std::uint32_t magic = right_magic;
  std::uint32_t bytes = 0;
  std::array<char, 24> version{};
  std::int64_t pid = 0;
  std::uint64_t network = 0;
  std::uint32_t user = 0;
  std::uint32_t has_obstacle = 0;  ///< it cannot share memory
  SyncGroup::Nonce nonce{};
  std::array<char, 40> boot{};
  std::array<char, 128> host{};
  std::array<std::byte, 272> reserved{};
};
static_assert(sizeof(Card) == 512, "ranks of other versions have to understand that they are");

/// This process's.
Card own_card();

/// Throws Error(version) where ranks cannot understand each other: they run different versions of Muster, or on
/// machines of different byte order. Of all ranks' cards, so that all come to the same end.
void check_versions(std::span<const Card> cards);

/// Collective over all ranks of the transport. Throws Error(timeout), Error(version), Error(io).
Met meet(Transport& transport, std::chrono::milliseconds timeout);

}  // namespace muster::hosts

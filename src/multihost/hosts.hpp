// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds the ranks that can share memory. Host names are not sufficient for this, so the ranks try it.
//
//  1. Every rank sends a card to all others: its version of Muster, the boot ID of its kernel, its network namespace,
//     its user, and whether an obstacle keeps it from sharing memory. Meanwhile it holds a socket name that only its
//     network namespace can see. Ranks with the same boot ID, namespace and user may be able to share memory.
//     Each card also says how many more files its rank can open. If a rank needs more for the group, all ranks throw
//     before the group exists.
//  2. Two virtual machines that were cloned from one snapshot have the same values in all of these. So every rank
//     checks which of the names it can see, and sends the first rank whose name it sees to all others. Ranks with the
//     same first rank are on one host.
//  3. The ranks of a host form a local group. This takes seconds at most, because all of them have just answered.
//  4. All ranks exchange the results. If one rank has failed, each rank of its host counts as a separate host.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/group/group.hpp"
#include "src/multihost/transport.hpp"

namespace muster::multihost {

struct Hosts {
  /// The ranks of each host in ascending order; hosts in the order of their first rank.
  std::vector<std::vector<int>> members;
  std::vector<int> host_of;   ///< the host of each rank
  std::vector<int> place_of;  ///< the position of each rank among the ranks of its host
  int mine = 0;
  std::shared_ptr<Group> local;  ///< the group of the ranks of this host, in their order

  Hosts() = default;
  /// Element i of `keys` belongs to rank i: ranks with equal keys are on one host. `self` is this rank.
  Hosts(std::span<const int> keys, int self);
  [[nodiscard]] const std::vector<int>& on(int host) const { return members[static_cast<std::size_t>(host)]; }
  [[nodiscard]] const std::vector<int>& here() const { return on(mine); }
  [[nodiscard]] int leader(int host) const { return on(host).front(); }
  [[nodiscard]] bool is_here(int rank) const { return host_of[static_cast<std::size_t>(rank)] == mine; }
};

/// If rank A waits for B and B waits for C, A's deadline is one step later than B's. So the error of B, which names C,
/// comes first. The deadlines of these waits follow one another in this order:
///  - the ranks of a host for each other,
///  - leaders for those below them in the tree, from the leaves to the root,
///  - leaders for the one above, from the root to the leaves,
///  - the other ranks for their leader.
inline constexpr std::chrono::milliseconds wait_step{400};

/// The tree of hosts through which the records of a round and failure messages are sent. With a single hub, the hub
/// would send all records once per host: 268 MB per round for 4,096 ranks on 512 hosts. For a few hosts the tree is
/// such a hub. It contains hosts 0 to `hosts` - 1; host 0 is the root. Each host has at most `most_children` children.
struct HostTree {
  static constexpr int most_children = 8;

  int hosts = 1;

  /// Returns -1 for the root.
  [[nodiscard]] int parent(int host) const noexcept { return host == 0 ? -1 : (host - 1) / most_children; }
  /// Returns the children in ascending order.
  [[nodiscard]] std::vector<int> children(int host) const {
    std::vector<int> all;
    const int first = host * most_children + 1;
    for (int child = first; child < std::min(first + most_children, hosts); ++child) all.push_back(child);
    return all;
  }
  /// Returns the host and all hosts below it in preorder: a host, then the subtree of each child.
  [[nodiscard]] std::vector<int> with_all_below(int host) const {
    std::vector<int> all{host};
    for (const int child : children(host)) {
      const std::vector<int> below = with_all_below(child);
      all.insert(all.end(), below.begin(), below.end());
    }
    return all;
  }
  /// Returns the number of steps to the root.
  [[nodiscard]] int depth(int host) const noexcept {
    int steps = 0;
    for (int at = host; at != 0; at = parent(at)) ++steps;
    return steps;
  }
  /// Returns the number of steps to the farthest host below.
  [[nodiscard]] int height(int host) const noexcept {
    int steps = 0;
    // The subtree of the first child is at least as high as those of the other children.
    for (int at = host * most_children + 1; at < hosts; at = at * most_children + 1) ++steps;
    return steps;
  }
};

/// The information that every rank has about all ranks after the rendezvous.
struct Met {
  std::vector<RankInfo> ranks;
  Group::Nonce nonce{};  ///< the nonce of rank 0
  Hosts hosts;
};

/// The metadata record of a rank. Its first fields are the same in all versions.
struct RankMetadata {
  static constexpr std::uint32_t right_magic = 0x4d4d5049;
  std::uint32_t magic = right_magic;
  std::uint32_t bytes = 0;
  std::array<char, 24> version{};
  std::int64_t pid = 0;
  std::uint64_t network = 0;
  std::uint32_t user = 0;
  std::uint32_t has_obstacle = 0;  ///< 1 if the rank cannot share memory
  Group::Nonce nonce{};
  std::array<char, 40> boot{};
  std::array<char, 128> host{};
  std::uint32_t layout = group::group_layout;
  std::array<std::byte, 4> zero{};
  std::uint64_t open_files_left = 0;  // os::open_files_left() before the rendezvous
  Transport::Contact contact{};
  std::array<std::byte, 232> reserved{};
};
static_assert(sizeof(RankMetadata) == 512, "ranks of other versions must recognize the difference");

/// Returns the card of this process.
RankMetadata own_card();

/// Throws Error(version) if the ranks run different versions or builds of Muster, or have different byte orders.
/// `cards` contains the cards of all ranks, so that all ranks reach the same result.
void check_versions(std::span<const RankMetadata> cards);

/// Throws Error(io) if the limit of open files of any rank is too low for the group. Logs a warning on rank 0 if the
/// limit is enough for the group, but not for gathers and exports of all ranks. The same on all ranks.
void check_limits(std::span<const RankMetadata> cards, const Hosts& hosts, const Transport& transport);

/// Collective over all ranks of the transport. `open_files_left` is os::open_files_left() before the rendezvous. Throws
/// Error(timeout), Error(version), Error(io).
Met meet(Transport& transport, std::chrono::milliseconds timeout, std::uint64_t open_files_left);

}  // namespace muster::multihost

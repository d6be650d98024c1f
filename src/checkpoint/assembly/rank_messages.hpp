// SPDX-License-Identifier: Apache-2.0
#pragma once
// Messages between rank 0 and all other ranks. Within a host they pass through its first rank, and between hosts along
// the tree of hosts. So no rank needs a connection to all others. Every kind of group supports them.

#include <cstddef>
#include <map>
#include <vector>

#include "src/group/group.hpp"

namespace muster {

/// The ranks with which a rank exchanges such messages.
struct RankNeighbours {
  int above = -1;                         ///< -1 on rank 0
  std::map<int, std::vector<int>> below;  ///< by neighbour: the ranks whose messages it passes on, and itself

  explicit RankNeighbours(const group::BaseGroup& group);
};

/// Collective. Returns on rank 0 the messages of all ranks, by rank. Returns nothing on the other ranks. Throws as
/// Group::receive.
std::vector<std::vector<std::byte>> gather_messages(group::BaseGroup& group, std::vector<std::byte> mine,
                                                    const WaitOptions& wait);
/// Collective. Returns the message of rank 0 on all ranks. Throws as Group::receive.
std::vector<std::byte> spread_message(group::BaseGroup& group, std::vector<std::byte> of_first,
                                      const WaitOptions& wait);
/// Collective. Sends each rank the message that rank 0 passes for it in `all`, by rank. Returns the message for this
/// rank. Throws as Group::receive.
std::vector<std::byte> scatter_messages(group::BaseGroup& group, std::vector<std::vector<std::byte>> all,
                                        const WaitOptions& wait);

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// HostsMembership: the tables from which a group of several hosts is made.

#include <memory>
#include <utility>

#include "src/group/rank_table.hpp"
#include "src/multihost/hosts.hpp"

namespace muster::multihost {

/// The ranks of a group and their hosts. A group shares the tables with its duplicates.
struct HostsMembership {
  std::shared_ptr<const group::RankTable> ranks;
  std::shared_ptr<const Hosts> hosts;  ///< without the local group
  std::shared_ptr<Group> local;        ///< the group of the ranks of this host, in their order
  Group::Nonce nonce{};

  HostsMembership() = default;
  explicit HostsMembership(Met met)
      : ranks(group::RankTable::make(std::move(met.ranks))), local(std::move(met.hosts.local)), nonce(met.nonce) {
    hosts = std::make_shared<const Hosts>(std::move(met.hosts));
  }
};

}  // namespace muster::multihost

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an export has to know of the hosts that its ranks are on, and to prove.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/checkpoint/shard_set.hpp"

namespace muster {

/// Whether not all ranks share memory. Local, the same on all.
bool is_spread(const SyncGroup& group);

/// What a rank could have of shared memory.
struct RankRoom {
  std::uint64_t bytes = 0;
  std::string limit;  ///< what it is that allows no more
};

/// Collective. Every rank tells rank 0 what its shards have, by messages, which every group has: there, what each rank
/// said. Throws as SyncGroup::send.
std::vector<std::vector<std::byte>> gather_listings(SyncGroup& group, const std::vector<ShardListing>& mine);
/// Of what gather_listings() gave. `rooms` gets one of each rank. Throws Error(corrupt).
std::vector<ShardListing> read_listings(std::span<const std::vector<std::byte>> told, std::vector<RankRoom>& rooms);

/// `needed`: shared memory that each rank will take. Throws Error(no_space) where a host has less than its ranks need.
void check_rooms(const SyncGroup& group, std::span<const RankRoom> rooms, std::span<const std::uint64_t> needed);

/// Waits until this rank sees the directory that rank 0 has made: names of it are new everywhere, so whoever finds it
/// sees that one. Throws Error(argument) with the remedy where it does not come.
void look_for_output(SyncGroup& group, const std::string& directory);

}  // namespace muster

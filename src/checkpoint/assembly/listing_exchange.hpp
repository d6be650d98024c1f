// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exchange of listings: every rank tells rank 0 which tensors it has, without their elements.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/checkpoint/assembly/export_source.hpp"
#include "src/group/group.hpp"
#include "src/os/shared_memory.hpp"

namespace muster {

/// The memory that a rank has left.
using RankRoom = os::MemoryHeadroom;

/// Encodes the listings of a rank, and the shared memory that it has left.
std::vector<std::byte> encode_listings(const ExportSource& mine);
/// Collective. Returns on rank 0 the listings of every rank, by rank.
std::vector<std::vector<std::byte>> gather_listings(group::BaseGroup& group, std::vector<std::byte> mine);
/// Decodes the result of gather_listings(); `whole` is ExportSource::whole() of rank 0. Sets one entry per rank in
/// `rooms`. Throws Error(corrupt | rank_mismatch).
std::vector<ShardListing> read_listings(std::span<const std::vector<std::byte>> told, const std::string& whole,
                                        std::vector<RankRoom>& rooms);

/// `needed` is the memory that each rank will use. Throws Error(out_of_space) if a host has less than its ranks need.
/// The message names `purpose`, such as "shared memory for windows", and ends with `alternative`, such as
/// "lower the memory budget".
void check_rooms(const Group& group, std::span<const RankRoom> rooms, std::span<const std::uint64_t> needed,
                 std::string_view purpose, std::string_view alternative);

}  // namespace muster

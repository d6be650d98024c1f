// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/export_hosts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

#include "muster/error.hpp"
#include "src/core/descriptor.hpp"
#include "src/core/quoted.hpp"
#include "src/os/directory.hpp"
#include "src/os/shared_memory.hpp"
#include "src/workspace/discovery.hpp"

namespace muster {
namespace {

constexpr std::uint64_t longest_listing = std::uint64_t{1} << 32;
}  // namespace

bool is_spread(const SyncGroup& group) {
  for (int rank = 1; rank < group.size(); ++rank)
    if (group.host_of(rank) != group.host_of(0)) return true;
  return false;
}

std::vector<std::vector<std::byte>> gather_listings(SyncGroup& group, const std::vector<ShardListing>& mine) {
  const WaitOptions wait{.phase = "export: gathering what the shards have"};
  ConfigArray shards;
  for (const ShardListing& listing : mine) shards.push_back(to_config(listing));
  const os::MemoryHeadroom room = os::memory_headroom(os::default_backing());
  const Config value = Config::object(
      {{"shards", std::move(shards)}, {"room", room.bytes}, {"limit", std::string(os::to_string(room.limit))}});
  std::vector<std::vector<std::byte>> told;
  told.push_back(core::encode_descriptor(value, [](const Tensor&) { return std::nullopt; }));
  if (group.rank() != 0) {
    group.send(0, told.front(), wait, Subject::exchange);
    return {};
  }
  for (int rank = 1; rank < group.size(); ++rank)
    told.push_back(group.receive(rank, longest_listing, wait, Subject::exchange));
  return told;
}

std::vector<ShardListing> read_listings(std::span<const std::vector<std::byte>> told, std::vector<RankRoom>& rooms) {
  std::vector<ShardListing> listings;
  for (const auto& message : told) {
    const Config value =
        core::decode_descriptor(message, [](DType, const Shape&, std::uint64_t, core::Place) -> Tensor {
          throw Error(ErrorKind::corrupt, "what a rank says of its shards has tensors in it");
        });
    for (const Config& listing : value.at("shards").as_array()) listings.push_back(listing_from_config(listing));
    rooms.push_back({value.at("room").as_uint(), value.at("limit").as_string()});
  }
  return listings;
}

void check_rooms(const SyncGroup& group, std::span<const RankRoom> rooms, std::span<const std::uint64_t> needed) {
  std::map<int, std::uint64_t> by_host;
  for (int rank = 0; rank < group.size(); ++rank)
    by_host[group.host_of(rank)] += needed[static_cast<std::size_t>(rank)];
  for (int rank = 0; rank < group.size(); ++rank) {
    const RankRoom& room = rooms[static_cast<std::size_t>(rank)];
    const std::uint64_t all = by_host[group.host_of(rank)];
    if (all <= room.bytes) continue;
    throw Error(ErrorKind::no_space,
                fmt::format("too little shared memory for the windows of an export: needed {} bytes on host {}, "
                            "available {} ({}): lower the memory budget, or give the job more memory",
                            all, group.info(rank).host, room.bytes, room.limit));
  }
}

void look_for_output(SyncGroup& group, const std::string& directory) {
  const auto longest = std::min<std::chrono::milliseconds>(group.timeout(), workspace::longest_lateness);
  try {
    workspace::patiently(directory,
                         {.deadline = std::chrono::steady_clock::now() + longest, .check = [&] { group.progress(); }},
                         [&] { (void)os::open_directory(directory); });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    const RankInfo& own = group.info(group.rank());
    throw Error(ErrorKind::argument,
                fmt::format("host {} does not see the directory {} that rank 0 (host {}) has just made: name an output "
                            "that all hosts mount, or let rank 0 write everything (--writers first)",
                            own.host, in_quotes(directory), group.info(0).host),
                {.path = directory});
  }
}

}  // namespace muster

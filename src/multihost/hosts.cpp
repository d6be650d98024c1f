// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/hosts.hpp"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>

#include "muster/log.hpp"
#include "muster/version.hpp"
#include "src/base/fixed_string.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/region.hpp"
#include "src/multihost/forwarding.hpp"
#include "src/os/clock.hpp"
#include "src/os/fault.hpp"
#include "src/os/process.hpp"
#include "src/os/socket.hpp"
#include "src/rendezvous/unix.hpp"
#include "src/workspace/names.hpp"

namespace muster::multihost {
namespace {

std::uint64_t network_namespace() noexcept {
  // Tests make two hosts look like machines that were cloned from one snapshot.
  if (os::fault("stat", "the network namespace") != 0) return 1;
  struct stat status {};
  return ::stat("/proc/self/ns/net", &status) == 0 ? status.st_ino : 0;
}

/// Returns the name that this process holds during the rendezvous. Only ranks of its network namespace can see it.
std::string beacon_name(const Group::Nonce& nonce) {
  return "muster-beacon-" + workspace::job_text(nonce);
}

/// Returns the reason why this process cannot share memory, or an empty string if none is known.
std::string obstacle() noexcept {
  try {
    (void)group::Region::own();
    (void)os::own_pidfd();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Returns one key per rank. Ranks that may be able to share memory according to their cards have the same key: the
/// first of these ranks.
std::vector<int> keys_of(std::span<const RankMetadata> cards) {
  std::vector<int> keys;
  std::map<std::tuple<std::string, std::uint64_t, std::uint32_t>, int> known;
  for (int rank = 0; rank < static_cast<int>(cards.size()); ++rank) {
    const RankMetadata& card = cards[static_cast<std::size_t>(rank)];
    const bool is_known = card.network != 0 && get_text(card.boot) != os::unknown_boot && card.has_obstacle == 0;
    const std::string boot = is_known ? get_text(card.boot) : "rank " + std::to_string(rank);
    keys.push_back(known.emplace(std::tuple(boot, card.network, card.user), rank).first->second);
  }
  return keys;
}

}  // namespace

Hosts::Hosts(std::span<const int> keys, int self) {
  std::map<int, std::size_t> known;
  for (const int key : keys) {
    const std::size_t host = known.emplace(key, members.size()).first->second;
    if (host == members.size()) members.emplace_back();
    const int rank = static_cast<int>(host_of.size());
    host_of.push_back(static_cast<int>(host));
    place_of.push_back(static_cast<int>(members[host].size()));
    members[host].push_back(rank);
  }
  mine = host_of[static_cast<std::size_t>(self)];
}

RankMetadata own_card() {
  RankMetadata card;
  card.bytes = sizeof card;
  put_text(card.version, version());
  card.pid = os::process_id();
  card.network = network_namespace();
  card.user = os::user_id();
  put_text(card.boot, os::own_identity().boot);
  os::random_bytes(card.nonce);
  put_text(card.host, os::host_name());
  return card;
}

void check_versions(std::span<const RankMetadata> cards) {
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const RankMetadata& card = cards[rank];
    if (card.magic == __builtin_bswap32(RankMetadata::right_magic))
      throw Error(
          ErrorKind::version,
          fmt::format(
              "rank {} runs on a machine with another byte order. Start all ranks on machines with the same byte order",
              rank),
          {.rank = static_cast<int>(rank)});
    if (card.magic != RankMetadata::right_magic || card.bytes != sizeof(RankMetadata) ||
        get_text(card.version) != get_text(cards.front().version))
      throw Error(ErrorKind::version,
                  fmt::format("rank {} runs Muster {}, rank 0 runs {}. Start all ranks with one version", rank,
                              get_text(card.version), get_text(cards.front().version)),
                  {.rank = static_cast<int>(rank), .host = get_text(card.host)});
    if (card.layout != cards.front().layout)
      throw Error(ErrorKind::version,
                  fmt::format("rank {} runs a build of Muster with group layout {}, and rank 0 one with layout {}. "
                              "Install the same version of Muster on all hosts",
                              rank, card.layout, cards.front().layout),
                  {.rank = static_cast<int>(rank), .host = get_text(card.host)});
  }
}

void check_limits(std::span<const RankMetadata> cards, const Hosts& hosts, const Transport& transport) {
  // Per rank of the host: two files of the local group, one socket if this rank is the relay of the rendezvous, and one
  // while the first rank makes the local group. Rank 0 also has a connection to each relay.
  constexpr std::uint64_t of_libraries = 12;
  const std::uint64_t size = cards.size();
  const std::uint64_t neighbours = std::min<std::uint64_t>(size - 1, HostTree::most_children + 1);
  std::optional<Error> warning;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const std::vector<int>& host = hosts.on(hosts.host_of[rank]);
    const std::uint64_t here = host.size();
    const std::uint64_t local = (static_cast<std::size_t>(host.front()) == rank ? 4 : 3) * here + of_libraries;
    const std::uint64_t relays = rank == 0 ? transport.open_files_for(hosts.members.size()) / 2 : 0;
    const std::uint64_t needed = local + transport.open_files_for(neighbours) + relays;
    // If many ranks are elsewhere, a root receives from one rank per host (Carriers), and a gateway forwards the
    // packets of some hosts (Forwarding).
    const std::uint64_t of_many = hosts.members.size() / 2 + hosts.members.size() / here + neighbours;
    const std::uint64_t partners =
        std::min<std::uint64_t>(size - here, std::max<std::uint64_t>(Forwarding::most_direct, of_many));
    const std::uint64_t wanted = std::max(needed, local + transport.open_files_for(partners));
    const std::uint64_t left = cards[rank].open_files_left;
    if (left >= wanted) continue;
    const auto error = [&](const char* of_what, std::uint64_t count) {
      return group::in_name_of(
          {static_cast<int>(rank), get_text(cards[rank].host), cards[rank].pid},
          os::open_files_error(fmt::format("{} of {} ranks on {} hosts", of_what, size, hosts.members.size()), count,
                               left));
    };
    if (left < needed) throw error("a group", needed);
    if (!warning && transport.rank() == 0) warning = error("a gather or an export", wanted);
  }
  if (warning) log(LogLevel::warning, warning->what());
}

Met meet(Transport& transport, std::chrono::milliseconds timeout, std::uint64_t open_files_left) {
  using Clock = os::Clock;
  const int self = transport.rank();
  const Clock::time_point deadline = Clock::now() + timeout;
  const auto left = [&] {
    return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()),
                    std::chrono::milliseconds(1000));
  };
  // Step 1.
  RankMetadata mine = own_card();
  std::string why_not = obstacle();
  os::Fd beacon;
  try {
    beacon = os::hold_name(beacon_name(mine.nonce));
  } catch (const Error& error) {
    why_not = error.what();
  }
  mine.has_obstacle = why_not.empty() ? 0 : 1;
  mine.open_files_left = open_files_left;
  mine.contact = transport.contact();
  const std::vector<std::byte> bytes = transport.tell_all(std::as_bytes(std::span(&mine, 1)), timeout);
  std::vector<RankMetadata> cards(static_cast<std::size_t>(transport.size()));
  std::memcpy(cards.data(), bytes.data(), bytes.size());
  check_versions(cards);
  std::vector<Transport::Contact> contacts;
  for (const RankMetadata& card : cards) contacts.push_back(card.contact);
  transport.learn(std::move(contacts));
  Met met;
  met.nonce = cards.front().nonce;
  for (std::size_t rank = 0; rank < cards.size(); ++rank)
    met.ranks.push_back({static_cast<int>(rank), get_text(cards[rank].host), cards[rank].pid});
  const auto warn = [&](const std::string& why) {
    log(LogLevel::warning,
        fmt::format("rank {} does not share memory with other ranks of its host and reaches them over {}: {}", self,
                    transport.name(), why));
  };
  if (!why_not.empty()) warn(why_not);

  std::vector<int> keys = keys_of(cards);
  if (Hosts(keys, self).members.size() < cards.size()) {
    // Step 2. All ranks have the same cards, so either all of them or none of them execute this step.
    std::int32_t first = self;
    const Hosts hosts(keys, self);
    for (const int rank : hosts.here()) {
      if (rank == self || os::is_name_held(beacon_name(cards[static_cast<std::size_t>(rank)].nonce))) {
        first = rank;
        break;
      }
    }
    const std::vector<std::byte> firsts = transport.tell_all(std::as_bytes(std::span(&first, 1)), left());
    std::memcpy(keys.data(), firsts.data(), firsts.size());
  }
  const Hosts hosts(keys, self);
  check_limits(cards, hosts, transport);
  // Step 3.
  const std::vector<int>& here = hosts.here();
  std::shared_ptr<Group> local;
  std::byte has_met{1};
  if (here.size() > 1) {
    try {
      // All of them answered a moment ago.
      const std::chrono::milliseconds longest =
          std::chrono::seconds(10) + static_cast<int>(here.size()) * std::chrono::milliseconds(20);
      local = rendezvous::join_local_group(
          {.key = fmt::format("{} {} {}", transport.kind(), workspace::job_text(met.nonce), here.front()),
           .rank = hosts.place_of[static_cast<std::size_t>(self)],
           .size = static_cast<int>(here.size()),
           .timeout = std::min(left(), longest),
           .global_ranks = here},
          [&] { transport.watch(); });
    } catch (const std::exception& error) {
      transport.watch();
      has_met = std::byte{0};
      warn(error.what());
    }
  }
  // Step 4. Ranks whose attempt has failed arrive here only at their deadline.
  const std::vector<std::byte> met_there = transport.tell_all(std::span(&has_met, 1), left() + std::chrono::seconds(1));
  for (const std::vector<int>& host : hosts.members) {
    const bool all_met =
        std::ranges::all_of(host, [&](int rank) { return met_there[static_cast<std::size_t>(rank)] == std::byte{1}; });
    if (all_met) continue;
    for (const int rank : host) keys[static_cast<std::size_t>(rank)] = rank;
  }
  met.hosts = Hosts(keys, self);
  met.hosts.local = met.hosts.here().size() == 1 ? single_group() : local;
  met.hosts.local->set_timeout(timeout);
  return met;
}

}  // namespace muster::multihost

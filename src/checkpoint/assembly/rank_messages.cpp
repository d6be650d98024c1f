// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/rank_messages.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "src/base/byte_archive.hpp"
#include "src/group/error_propagation.hpp"
#include "src/multihost/hosts.hpp"

namespace muster {
namespace {

constexpr std::uint64_t longest_bundle = std::uint64_t{1} << 36;

/// The messages of some ranks, or for them.
using Bundle = std::map<int, std::vector<std::byte>>;

std::vector<std::byte> bytes_of(const Bundle& bundle) {
  ByteWriter out;
  out.count(bundle);
  for (const auto& [rank, message] : bundle) {
    out.values(rank);
    out.all(message);
  }
  return out.take();
}

/// Receives the bundle of exactly these ranks.
Bundle receive_bundle(group::BaseGroup& group, int from, std::span<const int> ranks, const WaitOptions& wait) {
  const std::vector<std::byte> bytes = group.receive(from, longest_bundle, wait, group::Subject::exchange);
  return group::or_blame(group, from, [&] {
    ByteReader in(bytes, "messages of several ranks");
    std::uint64_t count = 0;
    in.values(count);
    Bundle bundle;
    if (count != ranks.size()) in.refuse();
    for (std::uint64_t i = 0; i < count; ++i) {
      int rank = 0;
      in.values(rank);
      in.all(bundle[rank]);
    }
    in.end();
    if (!std::ranges::all_of(ranks, [&](int rank) { return bundle.contains(rank); })) in.refuse();
    return bundle;
  });
}

void send_bundle(group::BaseGroup& group, int to, const Bundle& bundle, const WaitOptions& wait) {
  group.send(to, bytes_of(bundle), wait, group::Subject::exchange);
}

}  // namespace

RankNeighbours::RankNeighbours(const group::BaseGroup& group) {
  std::vector<int> keys;
  for (int rank = 0; rank < group.size(); ++rank) keys.push_back(group.host_of(rank));
  const multihost::Hosts hosts(keys, group.rank());
  if (group.rank() != hosts.leader(hosts.mine)) {
    above = hosts.leader(hosts.mine);
    return;
  }
  const multihost::HostTree tree{static_cast<int>(hosts.members.size())};
  if (hosts.mine != 0) above = hosts.leader(tree.parent(hosts.mine));
  for (const int rank : hosts.here())
    if (rank != group.rank()) below[rank] = {rank};
  for (const int child : tree.children(hosts.mine)) {
    std::vector<int>& ranks = below[hosts.leader(child)];
    for (const int host : tree.with_all_below(child))
      ranks.insert(ranks.end(), hosts.on(host).begin(), hosts.on(host).end());
  }
}

std::vector<std::vector<std::byte>> gather_messages(group::BaseGroup& group, std::vector<std::byte> mine,
                                                    const WaitOptions& wait) {
  const RankNeighbours neighbours(group);
  Bundle bundle;
  bundle.emplace(group.rank(), std::move(mine));
  for (const auto& [from, ranks] : neighbours.below) bundle.merge(receive_bundle(group, from, ranks, wait));
  if (neighbours.above >= 0) {
    send_bundle(group, neighbours.above, bundle, wait);
    return {};
  }
  std::vector<std::vector<std::byte>> all;
  for (auto& [rank, message] : bundle) all.push_back(std::move(message));
  return all;
}

std::vector<std::byte> spread_message(group::BaseGroup& group, std::vector<std::byte> of_first,
                                      const WaitOptions& wait) {
  const RankNeighbours neighbours(group);
  std::vector<std::byte> message =
      neighbours.above < 0 ? std::move(of_first)
                           : group.receive(neighbours.above, longest_bundle, wait, group::Subject::exchange);
  for (const auto& [to, ranks] : neighbours.below) group.send(to, message, wait, group::Subject::exchange);
  return message;
}

std::vector<std::byte> scatter_messages(group::BaseGroup& group, std::vector<std::vector<std::byte>> all,
                                        const WaitOptions& wait) {
  const RankNeighbours neighbours(group);
  Bundle bundle;
  if (neighbours.above < 0) {
    for (std::size_t rank = 0; rank < all.size(); ++rank) bundle.emplace(static_cast<int>(rank), std::move(all[rank]));
  } else {
    std::vector<int> ranks{group.rank()};
    for (const auto& [to, below] : neighbours.below) ranks.insert(ranks.end(), below.begin(), below.end());
    bundle = receive_bundle(group, neighbours.above, ranks, wait);
  }
  for (const auto& [to, ranks] : neighbours.below) {
    Bundle part;
    for (const int rank : ranks) part.insert(bundle.extract(rank));
    send_bundle(group, to, part, wait);
  }
  return std::move(bundle.at(group.rank()));
}

}  // namespace muster

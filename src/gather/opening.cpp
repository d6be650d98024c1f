// SPDX-License-Identifier: Apache-2.0
#include "src/gather/opening.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace muster::gather {
namespace {

void check_list(std::span<const int> ranks, const SyncGroup& group) {
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= group.size())
      throw Error(ErrorKind::argument,
                  fmt::format("the list of ranks {} names rank {}, which is not in the group of {}", list_text(ranks),
                              rank, group.size()));
    if (!seen.insert(rank).second)
      throw Error(ErrorKind::argument, fmt::format("the list of ranks {} names rank {} twice", list_text(ranks), rank));
  }
}

}  // namespace

std::string list_text(std::span<const int> ranks) {
  return fmt::format("[{}]", fmt::join(ranks.begin(), ranks.end(), ", "));
}

bool enter_list(std::span<const int> ranks, const GatherOptions& options, Call& call, Record& record) {
  check_list(ranks, *call.group);
  if (options.pipeline_depth < 1) throw Error(ErrorKind::argument, "pipeline_depth must be at least 1");
  record.operation = call.operation;
  const auto self = std::ranges::find(ranks, call.group->rank());
  if (self == ranks.end()) return false;
  call.list.assign(ranks.begin(), ranks.end());
  call.position = static_cast<std::uint32_t>(self - ranks.begin());
  record.list_hash = hash_list(ranks);
  record.list_length = static_cast<std::uint32_t>(ranks.size());
  record.position = call.position;
  record.forced = forced_route(options);
  record.routes = usable_routes(call);
  return true;
}

Chosen choose_own_route(const Record& record) {
  std::vector<Route> preference;
  for (const auto& driver : RouteTable::instance().drivers()) preference.push_back(driver->route());
  Chosen chosen;
  chosen.choice = choose_route(record.list_length, record.routes, record.forced, preference);
  chosen.driver = RouteTable::instance().find(chosen.choice.route);
  if (chosen.choice.reason.empty()) chosen.choice.reason = chosen.driver->reason();
  return chosen;
}

void check_choice(const Call& call, const Choice& choice, std::span<const Record> records) {
  std::uint8_t common = 0xff;
  for (const int rank : call.list) common &= records[static_cast<std::size_t>(rank)].routes;
  if ((common & route_bit(choice.route)) == 0)
    throw Error(ErrorKind::unsupported, fmt::format("not all ranks of the list {} can use the route '{}'",
                                                    list_text(call.list), to_string(choice.route)));
}

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
#include "src/gather/opening.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "src/core/quoted.hpp"

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

std::string route_text(const GatherOptions& options) {
  return options.workspace_path.empty() ? std::string(to_string(forced_route(options)))
                                        : fmt::format("workspace ({})", in_quotes(options.workspace_path));
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

Chosen choose_own_route(const Call& call, const Record& record) {
  std::vector<Route> preference;
  for (const auto& driver : RouteTable::instance().drivers()) preference.push_back(driver->route());
  Chosen chosen;
  chosen.choice = choose_route(record.list_length, record.routes, record.forced, preference);
  chosen.driver = RouteTable::instance().find(chosen.choice.route);
  if (chosen.choice.reason.empty()) chosen.choice.reason = chosen.driver->reason(call);
  return chosen;
}

std::uint64_t settle_proofs(const Call& call, std::span<const Record> records, Proof* proof) {
  if (std::ranges::none_of(records, &Record::proves)) return 0;
  SyncGroup& group = *call.group;
  const std::optional<Error> trouble = attempt(group, [&] {
    if (proof != nullptr) proof->check(records);
  });
  ClosingRecord mine;
  if (trouble) mine.status = status_of(trouble->kind());
  const auto closing = round_of(group, mine, call.wait("gather: proving"));
  if (std::ranges::all_of(closing, [](const ClosingRecord& record) { return record.status == 0; })) {
    if (proof != nullptr) proof->commit();
    return 1;
  }
  const auto words = round_of(group, trouble ? words_of(*trouble) : Words{}, call.wait("gather: failing"));
  throw make_closing_error(closing, words, group);
}

void check_choice(const Call& call, const Choice& choice, std::span<const Record> records) {
  std::uint8_t common = 0xff;
  for (const int rank : call.list) common &= records[static_cast<std::size_t>(rank)].routes;
  if ((common & route_bit(choice.route)) == 0)
    throw Error(ErrorKind::unsupported, fmt::format("not all ranks of the list {} can use the route '{}'",
                                                    list_text(call.list), to_string(choice.route)));
}

}  // namespace muster::gather

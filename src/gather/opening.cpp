// SPDX-License-Identifier: Apache-2.0
#include "src/gather/opening.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "src/core/quoted.hpp"
#include "src/gather/async.hpp"

namespace muster::gather {
namespace {

void check_list(std::span<const int> ranks, const SyncGroup& group) {
  std::vector<bool> seen(static_cast<std::size_t>(group.size()));
  for (const int rank : ranks) {
    if (rank < 0 || rank >= group.size())
      throw Error(ErrorKind::argument,
                  fmt::format("the list of ranks {} names rank {}, which is not in the group of {}", list_text(ranks),
                              rank, group.size()));
    if (seen[static_cast<std::size_t>(rank)])
      throw Error(ErrorKind::argument, fmt::format("the list of ranks {} names rank {} twice", list_text(ranks), rank));
    seen[static_cast<std::size_t>(rank)] = true;
  }
}

}  // namespace

std::string list_text(std::span<const int> ranks) {
  return fmt::format("[{}]", fmt::join(ranks.begin(), ranks.end(), ", "));
}

std::string route_text(const GatherOptions& options) {
  return options.workspace.path.empty() ? std::string(to_string(forced_route(options)))
                                        : fmt::format("workspace ({})", in_quotes(options.workspace.path));
}

void refuse_asynchronous(const Config& value) {
  if (is_asynchronous() && (residency_of(value) | Residency::host) == Residency::mixed)
    throw Error(ErrorKind::unsupported,
                fmt::format("asynchronous calls take tensors on the host, and these are on {}: copy them there first, "
                            "or use the call without _async",
                            places_text(value)));
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
  const Forcing forcing = forcing_of(options);
  record.forced = call.forced = forcing.route;
  record.forced_by = forcing.by;
  record.routes = usable_routes(call);
  if (call.value != nullptr) refuse_asynchronous(*call.value);
  return true;
}

std::uint8_t usable_routes(const Call& call) {
  std::uint8_t routes = 0;
  for (const auto& driver : RouteTable::instance().drivers())
    if (driver->is_usable(call)) routes |= route_bit(driver->route());
  return routes;
}

const RouteDriver* guess_route(const Record& record) {
  const Decision guess = choose_route(facts_of(record));
  return guess.is_refused() ? nullptr : RouteTable::instance().find(guess.route);
}

Chosen chosen_route(const Call& call, std::span<const Record> records) {
  const Decision decision = decide(call.list, records);
  const RouteDriver* driver = RouteTable::instance().find(decision.route);
  const Record& own = records[static_cast<std::size_t>(call.group->rank())];
  std::string reason = forced_text({own.forced, own.forced_by});
  return {driver, reason.empty() ? driver->reason(call) : std::move(reason)};
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

}  // namespace muster::gather

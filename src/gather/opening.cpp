// SPDX-License-Identifier: Apache-2.0
#include "src/gather/opening.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/gather/agreement.hpp"

namespace muster::gather {
namespace {

void check_list(std::span<const int> ranks, const Group& group) {
  std::vector<bool> seen(static_cast<std::size_t>(group.size()));
  for (const int rank : ranks) {
    if (rank < 0 || rank >= group.size())
      throw Error(ErrorKind::invalid_argument,
                  out_of_range_text(fmt::format("list of ranks {}: rank", list_text(ranks)), rank, group.size()));
    if (seen[static_cast<std::size_t>(rank)])
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("list of ranks {}: rank {} occurs twice", list_text(ranks), rank));
    seen[static_cast<std::size_t>(rank)] = true;
  }
}

/// Returns the route that a rank forces, for messages: "workspace", "auto".
std::string route_text(const GatherOptions& options) {
  return options.workspace.path.empty() ? std::string(to_string(forcing_of(options).route))
                                        : fmt::format("workspace ({})", in_quotes(options.workspace.path));
}

/// Runs one all-gather of a record.
template <class T>
std::vector<T> round_of(const GatherCall& call, const T& mine, const char* phase) {
  std::vector<T> all(static_cast<std::size_t>(call.group->size()));
  call.group->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), call.wait(phase));
  return all;
}

/// Returns the conclusions from the records of all ranks.
Opening opening_of(const GatherCall& call, Records records) {
  Opening opening{.closes = needs_closing(records),
                  .needs_preflight = std::ranges::any_of(records, &ExchangeRecord::needs_preflight),
                  .needs_companion = std::ranges::any_of(records, [](const auto& one) { return one.needs_companion; })};
  if (call.is_member()) opening.decision = decide(call.list, records);
  for (const int rank : call.list) opening.payload_bytes += records[static_cast<std::size_t>(rank)].payload_bytes;
  opening.records = std::move(records);
  return opening;
}

}  // namespace

std::string list_text(std::span<const int> ranks) {
  return fmt::format("[{}]", fmt::join(ranks.begin(), ranks.end(), ", "));
}

bool enter_list(std::span<const int> ranks, const GatherOptions& options, GatherCall& call, ExchangeRecord& record) {
  check_list(ranks, *call.group);
  if (options.pipeline_depth < 1) throw Error(ErrorKind::invalid_argument, "pipeline_depth must be at least 1");
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
  for (const auto& driver : RouteTable::instance().drivers())
    if (driver->is_usable(call)) record.routes |= route_bit(driver->route());
  if (call.value != nullptr) refuse_asynchronous(*call.value);
  return true;
}

const RouteDriver* guess_route(const ExchangeRecord& record) {
  const Decision guess = choose_route(facts_of(record));
  return guess.is_refused() ? nullptr : RouteTable::instance().find(guess.route);
}

Chosen chosen_route(const GatherCall& call, const Opening& opening) {
  const RouteDriver* driver = RouteTable::instance().find(opening.decision.route);
  if (driver == nullptr) throw group::malformed_round("unknown route");
  const ExchangeRecord& own = opening.records[static_cast<std::size_t>(call.group->rank())];
  std::string reason = forced_text({own.forced, own.forced_by});
  return {driver, reason.empty() ? driver->reason(call) : std::move(reason)};
}

Opening opening_round(const GatherCall& call, const ExchangeRecord& mine, const std::optional<Error>& failure,
                      std::span<const int> ranks, const char* phase, const char* failing,
                      const std::function<std::string(Problem::Reason)>& words) {
  using Reason = Problem::Reason;
  if (call.group->has_folds()) {
    AgreementFold fold(*call.group);
    const auto answer = call.group->fold(std::as_bytes(std::span(&mine, 1)), fold, call.wait(phase));
    const auto opening =
        group::or_blame(*call.group, group::first_here, [&] { return AgreementFold::opening(answer, call, mine); });
    if (opening) return *opening;
  }
  Records records(round_of(call, mine, phase));
  const auto problem = find_problem(records, *call.group);
  if (!problem) return opening_of(call, std::move(records));
  const auto own = [&]() -> std::string {
    if (problem->reason == Reason::lists) return list_text(ranks);
    if (problem->reason == Reason::forced) return route_text(*call.options);
    if (problem->reason == Reason::refused) return call.is_member() ? refusal_words(call, problem->refused) : "";
    return words(problem->reason);
  };
  throw make_error(*problem, records, round_of(call, failure ? words_of(*failure) : words_of(own()), failing),
                   *call.group);
}

void closing_round(const GatherCall& call, const std::optional<Error>& trouble, const char* phase, const char* failing,
                   const std::function<void()>& on_failure) {
  const std::uint8_t status = trouble ? status_of(trouble->kind()) : 0;
  if (call.group->has_folds() && !call.group->any(status != 0, call.wait(phase))) return;
  const auto statuses = round_of(call, status, phase);
  std::vector<int> failed;
  for (std::size_t rank = 0; rank < statuses.size(); ++rank)
    if (statuses[rank] != 0) failed.push_back(static_cast<int>(rank));
  if (failed.empty()) return;
  if (on_failure) on_failure();
  throw failure_of(failed, round_of(call, trouble ? words_of(*trouble) : Words{}, failing), *call.group);
}

std::uint64_t run_preflights(const GatherCall& call, const Opening& opening, Preflight* preflight) {
  if (!opening.needs_preflight) return 0;
  const std::optional<Error> trouble = attempt(*call.group, [&] {
    if (preflight != nullptr) preflight->check(opening.records);
  });
  closing_round(call, trouble, "gather: preflight", "gather: failing");
  if (preflight != nullptr) preflight->commit();
  return 1;
}

}  // namespace muster::gather

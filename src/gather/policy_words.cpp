// SPDX-License-Identifier: Apache-2.0
// What is said about the policy's decisions; docs/routes.md has these words, too.

#include <fmt/core.h>

#include <algorithm>

#include "src/gather/opening.hpp"
#include "src/gather/policy.hpp"
#include "src/gather/route.hpp"

namespace muster::gather {
namespace {

/// What a program has to be linked with for a route that stands in a library of its own.
const char* not_loaded(Route route) {
  switch (route) {
    case Route::mpi:
      return "libmuster-mpi is not loaded: link the program with it (pkg-config muster-mpi)";
    case Route::device:
      return "libmuster-cuda is not loaded: link the program with it (pkg-config muster-cuda), or copy the tensors to "
             "the host first";
    default:
      return "this program has no such route";
  }
}

/// The list by position.
std::vector<int> list_of(int member, std::span<const Record> records) {
  const Record& any = records[static_cast<std::size_t>(member)];
  std::vector<int> list(any.list_length);
  for (std::size_t rank = 0; rank < records.size(); ++rank)
    if (records[rank].list_length != 0 && records[rank].list_hash == any.list_hash)
      list[records[rank].position] = static_cast<int>(rank);
  return list;
}

constexpr std::size_t shown = 8;
constexpr const char* to_the_host = "copy these tensors to the host first";

}  // namespace

std::string forced_text(Forcing forcing) {
  switch (forcing.by) {
    case ForcedBy::caller:
      return "forced by the caller";
    case ForcedBy::workspace_path:
      return "forced by workspace_path";
    case ForcedBy::environment:
      return "forced by MUSTER_ROUTE";
    case ForcedBy::nobody:
      break;
  }
  return {};
}

std::string names_of(std::uint8_t routes) {
  std::string text;
  for (std::uint8_t i = 1; i < 8; ++i)
    if ((routes & (1U << i)) != 0) text += (text.empty() ? "" : ", ") + std::string(to_string(static_cast<Route>(i)));
  return text.empty() ? "none" : text;
}

std::string refusal_words(const Call& call, const Decision& refused) {
  switch (refused.refusal) {
    case Refusal::forced_unusable:
    case Refusal::no_device_route: {
      const RouteDriver* driver = RouteTable::instance().find(refused.route);
      return driver == nullptr ? not_loaded(refused.route) : driver->obstacle(call);
    }
    case Refusal::unreachable: {
      std::string text;
      for (const auto& driver : RouteTable::instance().drivers())
        if (!driver->is_usable(call))
          text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", to_string(driver->route()), driver->obstacle(call));
      return text;
    }
    case Refusal::unfit:
      return {};
    default:
      return call.value == nullptr ? "the host" : places_text(*call.value);
  }
}

std::string refusal_text(const Decision& refused, std::span<const int> ranks, std::span<const Record> records,
                         std::span<const Words> words) {
  const std::vector<int> list = list_of(ranks.front(), records);
  const RouteFacts facts = facts_of(list, records);
  const Record& first = records[static_cast<std::size_t>(ranks.front())];
  const std::string who = fmt::format("the list {}", list_text(list));
  const std::string forced =
      fmt::format("the route '{}' is {}", to_string(first.forced), forced_text({first.forced, first.forced_by}));
  switch (refused.refusal) {
    case Refusal::none:
      break;
    case Refusal::mixed:
      return fmt::format("some tensors of {} are on the host, and some on devices: {}: gather them in two calls, or {}",
                         who, each_words(ranks, words, ": ", shown), to_the_host);
    case Refusal::merges_devices:
      return fmt::format(
          "merges read tensors of the host, and those of {} are on devices: {}: {}, or gather them and "
          "merge what came",
          who, each_words(ranks, words, ": ", shown), to_the_host);
    case Refusal::forced_off_devices:
      return fmt::format(
          "{}, which takes tensors of the host, and those of {} are on devices: {}: {}, or force no "
          "route",
          forced, who, each_words(ranks, words, ": ", shown), to_the_host);
    case Refusal::no_device_route:
      return fmt::format("tensors of {} are on devices, and not all of its ranks can take them from there: {}", who,
                         each_words(ranks, words, ": ", shown));
    case Refusal::forced_onto_devices:
      if (first.operation == Operation::merge || first.operation == Operation::stream)
        return fmt::format("{}, and {} takes tensors of the host: force no route", forced, to_string(first.operation));
      return fmt::format("{}, and the tensors of {} are on the host: {}: force no route", forced, who,
                         each_words(ranks, words, ": ", shown));
    case Refusal::forced_unusable:
      return fmt::format("{}, and {} of the {} ranks of {} cannot go by it: {}. All of them can go by: {}", forced,
                         ranks.size(), list.size(), who, each_words(ranks, words, ": ", shown), names_of(facts.routes));
    case Refusal::unreachable:
      return fmt::format(
          "no route reaches all {} ranks of {}: {}: give a workspace_path, a directory that all of them "
          "see",
          list.size(), who, each_words(ranks, words, ": ", shown));
    case Refusal::unfit: {
      std::string text;
      for (const int rank : ranks)
        text += fmt::format("{}rank {} could go by: {}", text.empty() ? "" : "; ", rank,
                            names_of(records[static_cast<std::size_t>(rank)].routes));
      return fmt::format(
          "the ranks of {} see different ways to each other, and have only '{}' in common: {}: force "
          "that route on all of them",
          who, to_string(refused.route), text);
    }
  }
  return "the ranks have no route";
}

ErrorKind kind_of(Refusal refusal) noexcept {
  return refusal == Refusal::mixed ? ErrorKind::argument : ErrorKind::unsupported;
}

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
// The policy's decision, its input, and the messages about it.

#include "src/gather/policy.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "src/gather/opening.hpp"
#include "src/gather/route.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

constexpr std::array names = {std::string_view("automatic"), std::string_view("local"), std::string_view("shm"),
                              std::string_view("workspace"), std::string_view("mpi"),   std::string_view("tcp"),
                              std::string_view("device")};
static_assert(names.size() == static_cast<std::size_t>(Route::device) + 1, "one name a route");

}  // namespace

std::string_view to_string(Route route) noexcept {
  const auto at = static_cast<std::size_t>(route);
  return at < names.size() ? names[at] : "unknown";
}

namespace gather {
namespace {

// In order of preference: shared memory between ranks of one host, then the transport between hosts (a group has one),
// and last a shared directory.
constexpr std::array on_the_host = {Route::shm, Route::mpi, Route::tcp, Route::workspace};

bool allows(const RouteFacts& facts, Route route) noexcept {
  return (facts.routes & route_bit(route)) != 0;
}

Decision refuse(Refusal refusal, Route route = Route::automatic) noexcept {
  return {route, refusal};
}

Decision choose_for_devices(const RouteFacts& facts) noexcept {
  if (facts.operation == Operation::merge) return refuse(Refusal::merges_devices);
  if (facts.forced != Route::automatic && facts.forced != Route::device)
    return refuse(Refusal::forced_off_devices, facts.forced);
  if (!allows(facts, Route::device)) return refuse(Refusal::no_device_route, Route::device);
  return {Route::device, Refusal::none};
}

}  // namespace

Decision choose_route(const RouteFacts& facts) noexcept {
  if (facts.residency == Residency::mixed) return refuse(Refusal::mixed);
  if (facts.residency == Residency::device) return choose_for_devices(facts);
  if (facts.forced == Route::device && (facts.residency == Residency::host || facts.operation == Operation::merge ||
                                        facts.operation == Operation::stream))
    return refuse(Refusal::forced_onto_devices, Route::device);
  if (facts.forced != Route::automatic)
    return allows(facts, facts.forced) ? Decision{facts.forced, Refusal::none}
                                       : refuse(Refusal::forced_unusable, facts.forced);
  if (allows(facts, Route::local)) return {Route::local, Refusal::none};
  for (const Route route : on_the_host)
    if (allows(facts, route)) return {route, Refusal::none};
  return refuse(Refusal::unreachable);
}

RouteFacts facts_of(const Record& record) noexcept {
  return {
      .operation = record.operation, .routes = record.routes, .forced = record.forced, .residency = record.residency};
}

RouteFacts facts_of(std::span<const int> members, std::span<const Record> records) noexcept {
  RouteFacts facts = facts_of(records[static_cast<std::size_t>(members.front())]);
  for (const int rank : members.subspan(1)) {
    const Record& record = records[static_cast<std::size_t>(rank)];
    facts.routes &= record.routes;
    facts.residency = facts.residency | record.residency;
  }
  return facts;
}

namespace {

/// Returns whether the rank has prepared its tensors for another route.
bool is_unfit(const Record& record, Route route) {
  return record.residency != Residency::none && choose_route(facts_of(record)) != Decision{route, Refusal::none};
}

/// Visits the tensors that have elements.
void visit_tensors(const Config& value, const auto& visit) {
  visit_leaves(value, [&](const Config& leaf) {
    if (leaf.is_tensor() && leaf.as_tensor().view().elements() != 0) visit(leaf.as_tensor().view());
  });
}

}  // namespace

Decision decide(std::span<const int> members, std::span<const Record> records) {
  const Decision decision = choose_route(facts_of(members, records));
  if (decision.is_refused()) return decision;
  const bool fits = std::ranges::none_of(
      members, [&](int rank) { return is_unfit(records[static_cast<std::size_t>(rank)], decision.route); });
  return fits ? decision : refuse(Refusal::unfit, decision.route);
}

std::vector<int> ranks_of(const Decision& refused, std::span<const int> members, std::span<const Record> records) {
  const auto is_about = [&](int rank) {
    const Record& record = records[static_cast<std::size_t>(rank)];
    switch (refused.refusal) {
      case Refusal::forced_unusable:
      case Refusal::no_device_route:
        return (record.routes & route_bit(refused.route)) == 0;
      case Refusal::mixed:
      case Refusal::merges_devices:
      case Refusal::forced_off_devices:
      case Refusal::forced_onto_devices:
        return record.residency != Residency::none || record.operation == Operation::stream;
      case Refusal::unfit:
        return is_unfit(record, refused.route);
      default:
        return true;
    }
  };
  std::vector<int> ranks;
  std::ranges::copy_if(members, std::back_inserter(ranks), is_about);
  if (ranks.empty()) ranks.assign(members.begin(), members.end());
  return ranks;
}

Residency residency_of(const Config& value) {
  Residency all = Residency::none;
  visit_tensors(value, [&](const TensorView& view) {
    all = all | (view.device().is_host() ? Residency::host : Residency::device);
  });
  return all;
}

std::string places_text(const Config& value) {
  std::vector<Device> places;
  visit_tensors(value, [&](const TensorView& view) {
    if (places.size() < 8 && std::ranges::find(places, view.device()) == places.end()) places.push_back(view.device());
  });
  std::string text;
  for (std::size_t i = 0; i < places.size(); ++i)
    text += std::string(i == 0                   ? ""
                        : i + 1 == places.size() ? " and "
                                                 : ", ") +
            (places[i].is_host() ? "the host" : to_string(places[i]));
  return text.empty() ? "no tensors" : text;
}

Forcing forcing_of(const GatherOptions& options) {
  if (!options.workspace.path.empty()) {
    if (options.route != Route::automatic && options.route != Route::workspace)
      throw Error(ErrorKind::argument, "workspace.path is given, and the route '" +
                                           std::string(to_string(options.route)) + "' is forced: one of them");
    return {Route::workspace, ForcedBy::workspace_path};
  }
  if (options.workspace.keep_files || options.workspace.zstd_level)
    throw Error(ErrorKind::argument, "workspace.keep_files and zstd_level need a path: other routes have no files");
  if (options.route != Route::automatic) return {options.route, ForcedBy::caller};
  const auto name = os::environment("MUSTER_ROUTE");
  if (!name) return {};
  std::string known;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto route = static_cast<Route>(i);
    if (*name == names[i]) return {route, route == Route::automatic ? ForcedBy::nobody : ForcedBy::environment};
    known += std::string(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + std::string(names[i]);
  }
  throw Error(ErrorKind::argument, "MUSTER_ROUTE is '" + *name + "': it must be " + known);
}

}  // namespace gather
}  // namespace muster

// Messages about the policy's decisions. docs/reference/errors.md quotes them.

namespace muster::gather {
namespace {

/// Returns which library a program must be linked with for a route that has its own library.
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

constexpr std::size_t shown = 8;
constexpr const char* to_the_host = "copy these tensors to the host first";

}  // namespace

std::string forced_text(Forcing forcing) {
  constexpr std::array<const char*, 4> words = {"", "forced by the caller", "forced by workspace.path",
                                                "forced by MUSTER_ROUTE"};
  const auto number = static_cast<std::size_t>(forcing.by);
  return number < words.size() ? words[number] : "";
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
          "no route reaches all {} ranks of {}: {}: give a workspace.path, a directory that all of them "
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

// SPDX-License-Identifier: Apache-2.0
// The decision itself, and what it looks at. What is said about it is in policy_words.cpp.

#include "src/gather/policy.hpp"

#include <algorithm>

#include "src/gather/route.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

constexpr std::array names = {std::string_view("automatic"), std::string_view("local"), std::string_view("shm"),
                              std::string_view("workspace"), std::string_view("mpi"),   std::string_view("device")};
static_assert(names.size() == static_cast<std::size_t>(Route::device) + 1, "one name a route");

}  // namespace

std::string_view to_string(Route route) noexcept {
  const auto at = static_cast<std::size_t>(route);
  return at < names.size() ? names[at] : "unknown";
}

namespace gather {
namespace {

// Of ranks that share memory; then the way between hosts; last what a group has that shares nothing but a directory.
constexpr std::array on_the_host = {Route::shm, Route::mpi, Route::workspace};

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

/// It has prepared its tensors for another route.
bool is_unfit(const Record& record, Route route) {
  return record.residency != Residency::none && choose_route(facts_of(record)) != Decision{route, Refusal::none};
}

void visit_tensors(const Config& value, const auto& visit, std::size_t depth = 0) {
  // What is nested deeper is refused where it is encoded.
  if (depth > max_config_depth) return;
  if (value.type() == Config::Type::tensor && value.as_tensor().view().elements() != 0) visit(value.as_tensor().view());
  if (value.type() == Config::Type::array)
    for (const Config& item : value.as_array()) visit_tensors(item, visit, depth + 1);
  if (value.type() == Config::Type::object)
    for (const auto& [key, member] : value.as_object()) visit_tensors(member, visit, depth + 1);
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
  if (!options.workspace_path.empty()) {
    if (options.route != Route::automatic && options.route != Route::workspace)
      throw Error(ErrorKind::argument, "workspace_path is given, and the route '" +
                                           std::string(to_string(options.route)) + "' is forced: one of them");
    return {Route::workspace, ForcedBy::workspace_path};
  }
  if (options.keep_files || options.zstd_level)
    throw Error(ErrorKind::argument, "keep_files and zstd_level need a workspace_path: other routes have no files");
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

Route forced_route(const GatherOptions& options) {
  return forcing_of(options).route;
}

}  // namespace gather
}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The policy: a pure function that chooses the route of a list from the records of its ranks.
// docs/explanation/routes.md shows it as a table. All ranks of the group evaluate it after round 1 and reach the same
// decision. Before round 1 each rank evaluates it with its own record only, and prepares for the most likely route.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather.hpp"
#include "src/gather/record.hpp"

namespace muster::gather {

struct Call;

/// Returns where the tensors of a config are. Tensors without elements do not count. Throws Error(argument) on nesting
/// beyond max_config_depth.
Residency residency_of(const Config& value);
/// Returns a text of the first few places for messages: "the host", "cuda:0", "the host and cuda:1".
std::string places_text(const Config& value);

/// The route that is forced on this rank, and its origin.
struct Forcing {
  Route route = Route::automatic;
  ForcedBy by = ForcedBy::nobody;
};
/// Returns the forced route: workspace.path, else GatherOptions::route, else MUSTER_ROUTE. Throws Error(argument) on an
/// unknown name and on options that contradict each other.
Forcing forcing_of(const GatherOptions& options);

/// The input of the policy, for one list or for one rank alone.
struct RouteFacts {
  Operation operation = Operation::configs;
  std::uint8_t routes = 0;                ///< bit r: all of these ranks could use Route(r)
  Route forced = Route::automatic;        ///< the only allowed route, unless automatic
  Residency residency = Residency::none;  ///< the union over all tensors
  friend bool operator==(const RouteFacts&, const RouteFacts&) = default;
};

/// The policy. Pure; defined for every input.
Decision choose_route(const RouteFacts& facts) noexcept;

/// Returns the facts of one rank's record alone, from which the rank prepares before it knows the other records.
RouteFacts facts_of(const Record& record) noexcept;
/// Returns the facts of a list. The order of its members does not matter.
RouteFacts facts_of(std::span<const int> members, std::span<const Record> records) noexcept;

/// Returns the route of a list. A rank with tensors has prepared them for the route that it guessed, so any other route
/// is refused.
Decision decide(std::span<const int> members, std::span<const Record> records);
/// Returns the members that a refusal is about.
std::vector<int> ranks_of(const Decision& refused, std::span<const int> members, std::span<const Record> records);

/// Returns a text such as "forced by MUSTER_ROUTE"; empty if no route is forced.
std::string forced_text(Forcing forcing);
/// Returns a text such as "local, shm"; "none" if there is no route.
std::string names_of(std::uint8_t routes);

/// Returns this rank's text if the policy has refused: why the route cannot be used here, or where its tensors are.
std::string refusal_words(const Call& call, const Decision& refused);
/// Returns the whole message, composed of the texts of `ranks`. It is the same on every rank of the group.
std::string refusal_text(const Decision& refused, std::span<const int> ranks, std::span<const Record> records,
                         std::span<const Words> words);
ErrorKind kind_of(Refusal refusal) noexcept;

}  // namespace muster::gather

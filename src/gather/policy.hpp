// SPDX-License-Identifier: Apache-2.0
#pragma once
// The policy: which route a list of ranks takes, as one pure function of what their records say. docs/routes.md has the
// same as a table. All ranks of the group evaluate it after round 1 and come to the same end; before round 1 a rank
// evaluates it for itself alone, and prepares what it most likely needs.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather.hpp"
#include "src/gather/record.hpp"

namespace muster::gather {

struct Call;

/// Where a config's tensors are. Those without elements are nowhere. Throws Error(argument) on nesting beyond
/// max_config_depth.
Residency residency_of(const Config& value);
/// "the host", "cuda:0", "the host and cuda:1": the first few places, for messages.
std::string places_text(const Config& value);

/// What is forced on this rank, and by what.
struct Forcing {
  Route route = Route::automatic;
  ForcedBy by = ForcedBy::nobody;
};
/// workspace.path, else GatherOptions::route, else MUSTER_ROUTE. Throws Error(argument) on an unknown name and on
/// options that contradict each other.
Forcing forcing_of(const GatherOptions& options);

/// What the policy looks at: of one list, or of one rank alone.
struct RouteFacts {
  Operation operation = Operation::configs;
  std::uint8_t routes = 0;                ///< bit r: every one of them could use Route(r)
  Route forced = Route::automatic;        ///< the only one that is allowed
  Residency residency = Residency::none;  ///< of all tensors together
  friend bool operator==(const RouteFacts&, const RouteFacts&) = default;
};

/// The policy. Pure; total.
Decision choose_route(const RouteFacts& facts) noexcept;

/// What one rank's record says about it alone: what it prepares for before it knows the others.
RouteFacts facts_of(const Record& record) noexcept;
/// Of a list, in any order of its members.
RouteFacts facts_of(std::span<const int> members, std::span<const Record> records) noexcept;

/// The route of a list, with the rule of the first guess: a rank that has tensors has prepared them for the route it
/// guessed, and no other will do.
Decision decide(std::span<const int> members, std::span<const Record> records);
/// Whom a refusal is about, of the members.
std::vector<int> ranks_of(const Decision& refused, std::span<const int> members, std::span<const Record> records);

/// "forced by MUSTER_ROUTE"; empty if nothing is forced.
std::string forced_text(Forcing forcing);
/// "local, shm"; "none".
std::string names_of(std::uint8_t routes);

/// What this rank has to say if the policy has refused: why the route in question cannot be used here, or where its
/// tensors are.
std::string refusal_words(const Call& call, const Decision& refused);
/// The whole message, made of the words of `ranks`: the same on every rank of the group.
std::string refusal_text(const Decision& refused, std::span<const int> ranks, std::span<const Record> records,
                         std::span<const Words> words);
ErrorKind kind_of(Refusal refusal) noexcept;

}  // namespace muster::gather

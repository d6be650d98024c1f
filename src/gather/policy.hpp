// SPDX-License-Identifier: Apache-2.0
#pragma once
// The policy: a pure function that chooses the route of a list from the records of its ranks.
// docs/explanation/routes.md shows it as a table. All ranks of a list follow the same decision, which is evaluated in
// round 1. Before round 1 each rank evaluates it with its own record only, and prepares for the most likely route.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>
#include "muster/config.hpp"
#include "muster/gather.hpp"
#include "src/gather/record.hpp"

namespace muster::gather {

struct GatherCall;

/// Returns where the tensors of a config are. Tensors without elements do not count. Throws Error(invalid_argument) on
/// nesting beyond max_config_depth.
Residency residency_of(const Config& value);
/// Returns a text of the first few places for messages: "the host", "cuda:0", "the host and cuda:1".
std::string places_text(const Config& value);

/// The route that is forced on this rank, and its origin.
struct Forcing {
  Route route = Route::auto_;
  ForcedBy by = ForcedBy::nobody;
};
/// Returns the forced route: workspace.path, else GatherOptions::route, else MUSTER_ROUTE. Throws
/// Error(invalid_argument) on an unknown name and on options that contradict each other.
Forcing forcing_of(const GatherOptions& options);

/// The input of the policy, for one list or for one rank alone.
struct RouteFacts {
  GatherKind operation = GatherKind::configs;
  std::uint8_t routes = 0;                ///< bit r: all of these ranks could use Route(r)
  Route forced = Route::auto_;            ///< the only allowed route, unless automatic
  Residency residency = Residency::none;  ///< the union over all tensors
  friend bool operator==(const RouteFacts&, const RouteFacts&) = default;
};

/// The policy. Pure; defined for every input.
Decision choose_route(const RouteFacts& facts) noexcept;

/// Returns the facts of one rank's record alone, from which the rank prepares before it knows the other records.
RouteFacts facts_of(const ExchangeRecord& record) noexcept;
/// Returns the facts of a list. The order of its members does not matter.
RouteFacts facts_of(std::span<const int> members, const Records& records) noexcept;

/// Returns the route of a list. A rank with tensors has prepared them for the route that it guessed, so any other route
/// is refused.
Decision decide(std::span<const int> members, const Records& records);
/// Returns the members that a refusal is about.
std::vector<int> ranks_of(const Decision& refused, std::span<const int> members, const Records& records);

/// Returns a text such as "forced by MUSTER_ROUTE"; empty if no route is forced.
std::string forced_text(Forcing forcing);
/// Returns a text such as "local, shm"; "none" if there is no route.
std::string names_of(std::uint8_t routes);

/// Returns this rank's text if the policy has refused: why the route cannot be used here, or where its tensors are.
std::string refusal_words(const GatherCall& call, const Decision& refused);
/// Returns the whole message, composed of the texts of `ranks`. It is the same on every rank of the group.
std::string refusal_text(const Group& group, const Decision& refused, std::span<const int> ranks,
                         const Records& records, std::span<const Words> words);
ErrorKind kind_of(NoRouteReason refusal) noexcept;

// The memory that ranks take for an exchange and for the parts of a stream. The functions are pure and use the records
// of round 1. They give the same result on all ranks that have the records of the members. A sender over shared memory
// knows its need in advance. For a root that merges or that receives from other hosts, the need follows from the
// records of the other ranks.

/// Returns the size of a piece of the window. A merge whose rows do not arrive at their final place uses a window with
/// two pieces per sender. `largest`: size of the largest tensor that uses the window.
std::uint64_t merge_piece_bytes(std::size_t senders, std::uint64_t largest) noexcept;
/// Returns the size of the whole window.
std::uint64_t merge_window_bytes(std::size_t senders, std::uint64_t largest) noexcept;

/// Returns the memory that a rank of the list `members` takes in addition to what it has. Returns 0 if it is not known
/// in advance. In that case the rank itself checks before it takes memory.
std::uint64_t fresh_bytes_of(int rank, const std::vector<int>& members, const Records& records, const Group& group);

struct StreamShare {
  std::uint64_t budget = 0;      ///< memory of one sender, in bytes
  std::uint64_t part_bytes = 0;  ///< tensor bytes of one sender in a part
  bool is_cut = false;           ///< less than requested, because the host has less memory available
};

/// Returns the share of each sender if a list of `length` ranks has `budget` bytes. All shares are equal: `depth` slots
/// of whole pages, each with one header page. Throws Error(invalid_argument) if that leaves no page for data.
StreamShare share_of(std::uint64_t budget, std::uint32_t length, std::uint32_t depth);

/// Returns the share of the list that contains `mine`. All memory of a list is on the host of its root: memory of
/// senders on that host, and the root's own memory for data from other hosts. If the budgets of all lists on a host
/// exceed the available memory, each budget is reduced in proportion. Returns an empty share for a rank in no list.
/// Throws Error(out_of_space) on all ranks alike.
StreamShare agree_on_share(const ExchangeRecord& mine, const Records& records,
                           const std::function<int(int rank)>& host_of);

}  // namespace muster::gather

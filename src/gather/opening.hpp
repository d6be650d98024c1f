// SPDX-License-Identifier: Apache-2.0
#pragma once
// Steps around round 1 that a gather and a stream share: check the list, choose the route, and turn a local failure
// into a status that all ranks receive.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/gather/policy.hpp"
#include "src/gather/route.hpp"
#include "src/group/error_propagation.hpp"

namespace muster::gather {

using group::attempt;

/// Returns a text such as "[0, 2, 1]".
std::string list_text(std::span<const int> ranks);

/// Throws Error(unsupported) if `value` has tensors on devices. Asynchronous calls call this: they do not know the work
/// that is queued on the caller's device stream.
void refuse_asynchronous(const Config& value);

/// Checks the list. Writes the list, this rank's position in it and the routes that it could use into call and record.
/// Returns false if this rank is not in the list and only takes part in the rounds. Throws Error(invalid_argument).
bool enter_list(std::span<const int> ranks, const GatherOptions& options, GatherCall& call, ExchangeRecord& record);

/// The driver of the chosen route, and the reason for the choice.
struct Chosen {
  const RouteDriver* driver = nullptr;  ///< null: the policy has refused the call
  std::string reason;
};
/// Before round 1: returns the route that this rank would use if all ranks of its list had the same record.
const RouteDriver* guess_route(const ExchangeRecord& record);
/// The conclusions of a rank from round 1.
struct Opening {
  /// The records that this rank needs. Its transfer uses no others: those of all members of its list, or on a sender of
  /// configs and tensors its own and that of the root.
  Records records = {};
  bool closes = false;           ///< a closing round follows
  bool needs_preflight = false;  ///< a rank needs a round before bytes move
  bool needs_companion = false;  ///< a rank has no companion for this stream
  // About the list of this rank, if it is in one:
  Decision decision = {};
  std::uint64_t payload_bytes = 0;  ///< of all members
};

/// After round 1, if there is no problem: returns the route of this rank's list.
Chosen chosen_route(const GatherCall& call, const Opening& opening);

/// Runs one round. If the records or this rank's `failure` do not allow the call to continue, further rounds exchange
/// error texts, and all ranks throw the same error. `words` returns this rank's text about a problem, in addition to
/// its list and its route. With several hosts the round is an agreement (agreement.hpp), and all records are exchanged
/// only after a problem.
Opening opening_round(const GatherCall& call, const ExchangeRecord& mine, const std::optional<Error>& failure,
                      std::span<const int> ranks, const char* phase, const char* failing,
                      const std::function<std::string(Problem::Reason)>& words);

/// Runs one round. Returns if all ranks have succeeded. Otherwise calls `on_failure`, exchanges error texts in one more
/// round, and throws the same error on all ranks. `trouble`: this rank's own error.
void closing_round(const GatherCall& call, const std::optional<Error>& trouble, const char* phase, const char* failing,
                   const std::function<void()>& on_failure = {});

/// Runs the round between opening and moving if a rank of any list needs one; `preflight` may be null. Returns the
/// number of rounds. If a check failed, throws the same error on all ranks.
std::uint64_t run_preflights(const GatherCall& call, const Opening& opening, Preflight* preflight);

/// Runs a collective call of the program: all ranks throw the same error. If the group has failed, that error is the
/// group's first cause, whatever error this rank has found meanwhile.
template <class Work>
auto collectively(Group& group, GatherKind operation, const Work& work) -> decltype(work()) {
  try {
    const group::GroupLock use(group);
    return group::unless_out_of_memory(group, work);
  } catch (const Error& error) {
    const std::optional<Error> cause = group.error();
    // The group may have failed long before this call. A forked child does not touch the state of its parent's group.
    if (cause && group::inside(group).is_owner_process())
      for (const auto& driver : RouteTable::instance().drivers()) driver->clean_up(group);
    throw cause.value_or(error).with_context(to_string(operation));
  }
}

/// Runs several independent pieces of work. Each one runs even if others have failed. Keeps the first failure.
class Attempts {
 public:
  explicit Attempts(const Group& group) : group_(group) {}
  template <class Work>
  void operator()(const Work& work) {
    std::optional<Error> failure = attempt(group_, work);
    if (!failure_) failure_ = std::move(failure);
  }
  [[nodiscard]] bool have_failed() const noexcept { return failure_.has_value(); }
  void throw_failure() const {
    if (failure_) throw *failure_;
  }

 private:
  const Group& group_;
  std::optional<Error> failure_;
};

}  // namespace muster::gather

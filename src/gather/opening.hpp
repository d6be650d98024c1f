// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a gather and a stream do alike around round 1: check the list, choose the route, turn a local failure into a
// status that all ranks hear of.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/gather/policy.hpp"
#include "src/gather/route.hpp"
#include "src/sync/failing.hpp"

namespace muster::gather {

using sync::attempt;

/// "[0, 2, 1]".
std::string list_text(std::span<const int> ranks);

/// Throws Error(unsupported) if it has tensors on devices and this is an asynchronous call, which does not know what is
/// queued on a caller's device stream.
void refuse_asynchronous(const Config& value);

/// Checks the list and writes it, this rank's place in it and the routes that it could use into call and record. False
/// if this rank is not in the list: then it only takes part in the rounds. Throws Error(argument).
bool enter_list(std::span<const int> ranks, const GatherOptions& options, Call& call, Record& record);

/// What drives a route, and why it is taken.
struct Chosen {
  const RouteDriver* driver = nullptr;  ///< null if the policy has refused
  std::string reason;
};
/// Before round 1: the route that this rank would take if all of its list were like it.
const RouteDriver* guess_route(const Record& record);
/// After round 1, if there is no problem: the route of this rank's list.
Chosen chosen_route(const Call& call, std::span<const Record> records);

/// One round. Returns the records of all ranks. Where they, or `failure` of this one, do not let the call go on, a
/// further round with the ranks' words follows, and all throw the same error. `words`: what this rank has to say of a
/// problem, beside its list and its route.
std::vector<Record> opening_round(const Call& call, const Record& mine, const std::optional<Error>& failure,
                                  std::span<const int> ranks, const char* phase, const char* failing,
                                  const std::function<std::string(Problem::Reason)>& words);

/// One round. Returns if all ranks are well. Else it calls `on_failure`, and all throw the same error, made of the
/// words of a further round. `trouble`: this rank's own.
void closing_round(const Call& call, const std::optional<Error>& trouble, const char* phase, const char* failing,
                   const std::function<void()>& on_failure = {});

/// The round between opening and moving, if a rank of any list needs one; `preflight` may be null. Returns how many
/// rounds that took. Throws what failed, on all ranks alike.
std::uint64_t run_preflights(const Call& call, std::span<const Record> records, Preflight* preflight);

/// A collective call of the program: all ranks throw the same. Where the group has failed that is its first cause,
/// whatever this rank has found meanwhile.
template <class Work>
auto collectively(SyncGroup& group, Operation operation, const Work& work) -> decltype(work()) {
  try {
    const sync::Use use(group);
    return sync::unless_out_of_memory(group, work);
  } catch (const Error& error) {
    const std::optional<Error> cause = group.failure();
    // The group may have failed long before this call. A forked child leaves the state of its parent's group alone.
    if (cause && sync::inside(group).is_owner_process())
      for (const auto& driver : RouteTable::instance().drivers()) driver->clean_up(group);
    throw cause.value_or(error).with_context(to_string(operation));
  }
}

/// Several such pieces of work, each of which is done whatever became of the others: the first failure counts.
class Attempts {
 public:
  explicit Attempts(const SyncGroup& group) : group_(group) {}
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
  const SyncGroup& group_;
  std::optional<Error> failure_;
};

}  // namespace muster::gather

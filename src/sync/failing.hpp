// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a rank does with a failure that the other ranks cannot see. Where a round follows anyway it is kept and told
// there, and the group goes on (attempt; Group::together has a round of its own). Where others already wait for
// what will not come it is the failure of the group (fail, or_fail).

#include <exception>
#include <new>
#include <optional>

#include "muster/sync_group.hpp"

namespace muster::sync {

/// "rank 3 (host a, pid 7)".
std::string name_of(const RankInfo& rank);
/// An error that `rank` is to blame for.
Error error_of(const RankInfo& rank, ErrorKind kind, const std::string& words);
/// "rank 3 (host a, pid 7): words": what failed on that rank.
Error in_name_of(const RankInfo& rank, const Error& cause);
/// Likewise, on this one. As it is if it names a rank already.
Error in_own_name(const SyncGroup& group, const Error& cause);

/// Makes `cause` the failure of all ranks and throws what all of them throw: the first one.
[[noreturn]] inline void fail(SyncGroup& group, const Error& cause) {
  group.poison(cause);
  throw group.failure().value_or(cause);
}

/// The same for a message from `from` that is longer than it can be.
[[noreturn]] void fail_on_message(SyncGroup& group, int from, std::uint64_t bytes, std::uint64_t most);
/// What all ranks of a round throw that see records of different lengths in it. The group remains usable.
Error different_calls(const RankInfo& one, const RankInfo& other);

/// Runs local work and returns what it fails with. What the group has failed with is thrown: nobody is left to tell.
template <class Work>
std::optional<Error> attempt(const SyncGroup& group, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    if (const auto cause = group.failure()) throw Error(*cause);
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::no_space, "out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorKind::io, error.what());
  }
  return std::nullopt;
}

/// Runs work that other ranks wait for: what it fails with is the failure of the group, in this rank's name.
template <class Work>
auto or_fail(SyncGroup& group, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const Error& error) {
    fail(group, in_own_name(group, error));
  } catch (const std::bad_alloc&) {
    fail(group, in_own_name(group, Error(ErrorKind::no_space, "out of memory")));
  }
}

/// Runs a call whose errors leave the group well. Out of memory in the middle of it does not: the others cannot go on.
template <class Work>
auto unless_out_of_memory(SyncGroup& group, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    fail(group, in_own_name(group, Error(ErrorKind::no_space, "out of memory")));
  }
}

}  // namespace muster::sync

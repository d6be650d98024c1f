// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a rank handles a failure that the other ranks cannot see. If a round follows anyway, the rank keeps the error and
// reports it in that round, and the group remains usable (attempt; Group::together runs a round of its own). If other
// ranks already wait for data that will not arrive, the whole group fails (fail, or_fail).

#include <exception>
#include <new>
#include <optional>

#include "muster/sync_group.hpp"

namespace muster::group {

/// Returns a name such as "rank 3 (host a, pid 7)".
std::string name_of(const RankInfo& rank);
/// Returns an error that was caused by `rank`.
Error error_of(const RankInfo& rank, ErrorKind kind, const std::string& words);
/// Returns the error with the failed rank in front of its message: "rank 3 (host a, pid 7): message".
Error in_name_of(const RankInfo& rank, const Error& cause);
/// Returns the error with this rank's name in front, or unchanged if it already names a rank.
Error in_own_name(const SyncGroup& group, const Error& cause);

/// Makes `cause` the failure of all ranks, and throws the group's first failure, as all ranks do.
[[noreturn]] inline void fail(SyncGroup& group, const Error& cause) {
  group.poison(cause);
  throw group.failure().value_or(cause);
}

/// Fails the group because a message from `from` is longer than `most` bytes.
[[noreturn]] void fail_on_message(SyncGroup& group, int from, std::uint64_t bytes, std::uint64_t most);
/// Returns the error that all ranks throw if the records of one round differ in length. The group remains usable.
Error different_calls(const RankInfo& one, const RankInfo& other);

/// Runs local work and returns its error, if any. If the group has failed, throws the group's failure, because the
/// other ranks no longer wait for a report.
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

/// Runs work that other ranks wait for. An error fails the group and names this rank.
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

/// Runs a call whose errors leave the group usable. Running out of memory inside it fails the group, because the other
/// ranks wait for the rest of the call.
template <class Work>
auto unless_out_of_memory(SyncGroup& group, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    fail(group, in_own_name(group, Error(ErrorKind::no_space, "out of memory")));
  }
}

}  // namespace muster::group

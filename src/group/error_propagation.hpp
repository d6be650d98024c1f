// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a rank handles a failure that the other ranks cannot see. If a round follows anyway, the rank keeps the error and
// reports it in that round, and the group remains usable (attempt; BaseGroup::together runs a round of its own). If
// other ranks already wait for data that will not arrive, the whole group fails (fail, or_fail).

#include <exception>
#include <new>
#include <optional>
#include <string>

#include "muster/group.hpp"

namespace muster::group {

/// Returns a name such as "rank 3 (host a, pid 7)".
std::string name_of(const RankInfo& rank);
/// Returns an error that was caused by `rank`.
Error error_of(const RankInfo& rank, ErrorKind kind, const std::string& words);
/// Returns the error with the failed rank in front of its message: "rank 3 (host a, pid 7): message".
Error in_name_of(const RankInfo& rank, const Error& cause);
/// Returns the error with this rank's name in front, or unchanged if it already names a rank.
Error in_own_name(const Group& group, const Error& cause);

/// Returns the first rank of the host of this rank.
int first_of_host(const Group& group);
/// Returns the error for a message that no rank of this version sends: "malformed message of a round: `words`", with
/// the remedy.
Error malformed_round(const std::string& words);

/// Makes `cause` the failure of all ranks, and throws the group's first failure, as all ranks do.
[[noreturn]] inline void fail(Group& group, const Error& cause) {
  group.abort(cause);
  throw group.error().value_or(cause);
}

/// Fails the group because a message from `from` is longer than `most` bytes.
[[noreturn]] void fail_on_message(Group& group, int from, std::uint64_t bytes, std::uint64_t most);
/// Returns the error that all ranks throw if the records of one round differ in length. The group remains usable.
Error different_calls(const RankInfo& one, const RankInfo& other);

/// Runs local work and returns its error, if any. If the group has failed, throws the group's failure, because the
/// other ranks no longer wait for a report.
template <class Work>
std::optional<Error> attempt(const Group& group, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    if (const auto cause = group.error()) throw Error(*cause);
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::out_of_space, "out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorKind::io, error.what());
  }
  return std::nullopt;
}

/// Runs work that other ranks wait for. An error fails the group and names this rank.
template <class Work>
auto or_fail(Group& group, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const Error& error) {
    fail(group, in_own_name(group, error));
  } catch (const std::bad_alloc&) {
    fail(group, in_own_name(group, Error(ErrorKind::out_of_space, "out of memory")));
  }
}

/// Runs work on a message of rank `from`, or of the first rank of this host. An error fails the group and names that
/// rank.
inline constexpr int first_here = -1;
template <class Work>
auto or_blame(Group& group, int from, const Work& work) -> decltype(work()) {
  return or_fail(group, [&] {
    try {
      return work();
    } catch (const Error& error) {
      throw in_name_of(group.info(from == first_here ? first_of_host(group) : from), error);
    }
  });
}

/// Runs a call whose errors leave the group usable. Running out of memory inside it fails the group, because the other
/// ranks wait for the rest of the call.
template <class Work>
auto unless_out_of_memory(Group& group, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    fail(group, in_own_name(group, Error(ErrorKind::out_of_space, "out of memory")));
  }
}

}  // namespace muster::group

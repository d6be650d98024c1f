// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank's failure becomes every rank's, before anybody waits for bytes that will not come.

#include <optional>

#include "muster/error.hpp"
#include "muster/sync_group.hpp"

namespace muster {

/// Collective. Each rank says how it went; where one failed, all throw the failure of the lowest such rank, with its
/// kind and words and in the details its rank, pid and host. Throws as SyncGroup::all_gather.
void agree(SyncGroup& group, const std::optional<Error>& failure, const char* phase);

/// Runs `step` on this rank and agrees on how it went.
template <class Step>
void agree_on(SyncGroup& group, const char* phase, Step&& step) {
  std::optional<Error> failure;
  try {
    step();
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure.emplace(ErrorKind::io, error.what());
  }
  agree(group, failure, phase);
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank's failure becomes every rank's, before anybody waits for bytes that will not come.

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>

#include "muster/error.hpp"
#include "muster/sync_group.hpp"
#include "src/sync/failing.hpp"

namespace muster {

/// Whose failure it is that a rank brings.
enum class Origin : std::uint8_t {
  self,   ///< its own: the others are told which rank it was
  named,  ///< perhaps another's: the words say whose, and the details have the rank
};

/// Collective. Each rank says how it went; if one failed, all throw the failure of the lowest such rank, with its
/// kind and words and in the details the rank where it began, its pid and host. Throws as SyncGroup::all_gather.
void agree(SyncGroup& group, const std::optional<Error>& failure, const char* phase, Origin origin = Origin::self);

/// Runs `step` on this rank and agrees on how it went.
template <class Step>
void agree_on(SyncGroup& group, const char* phase, const Step& step) {
  agree(group, sync::attempt(group, step), phase);
}

/// Likewise, if ranks wait for each other in it: in `companion`, a group for this step alone, whose failure it is
/// before anybody agrees.
template <class Step>
void agree_on(SyncGroup& group, SyncGroup& companion, const char* phase, const Step& step) {
  std::optional<Error> failure = sync::attempt(group, step);
  // Which rank it was; a failure that came from another has its name already.
  if (failure && group.size() > 1) failure = sync::in_own_name(group, *failure);
  if (failure) companion.poison(*failure);
  agree(group, failure, phase, Origin::named);
}

/// Between pieces of long work: the others see that it goes on. Throws the group's failure if there is one.
void go_on(SyncGroup& group);

/// As long as it lives, a stop request makes Error(cancelled) the failure of the group, so that all ranks end; not once
/// `too_late` is set.
using FailOnStop = std::stop_callback<std::function<void()>>;
FailOnStop fail_on_stop(SyncGroup& group, const std::stop_token& stop, const std::atomic<bool>* too_late = nullptr);

}  // namespace muster

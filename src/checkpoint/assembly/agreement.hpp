// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shares one rank's failure with all ranks, before any rank waits for bytes that will not arrive.

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>

#include "muster/error.hpp"
#include "muster/group.hpp"
#include "src/group/error_propagation.hpp"

namespace muster {

/// The rank to which a failure is attributed.
enum class FailureOrigin : std::uint8_t {
  self,   ///< the rank that reports it: its number is added to the message
  named,  ///< perhaps another rank: the message names it, and the details have its number
};

/// Collective. Each rank passes its failure, if any. If ranks failed, all throw the failure of the lowest such rank,
/// with its kind and message. Its details have the rank where the failure began, the pid and the host. Throws as
/// Group::all_gather.
void agree(Group& group, const std::optional<Error>& failure, const char* phase,
           FailureOrigin origin = FailureOrigin::self);

/// Runs `step` on this rank and agrees on the result.
template <class Step>
void agree_on(Group& group, const char* phase, const Step& step) {
  agree(group, group::attempt(group, step), phase);
}

/// Runs `step` and agrees on the result, for steps in which ranks wait for each other. `companion` is an auxiliary
/// group for this step alone; a failure aborts it before the ranks agree.
template <class Step>
void agree_on(Group& group, Group& companion, const char* phase, const Step& step) {
  std::optional<Error> failure = group::attempt(group, step);
  // Adds this rank's name to a failure; a failure that came from another rank has its name already.
  if (failure && group.size() > 1) failure = group::in_own_name(group, *failure);
  if (failure) companion.abort(*failure);
  agree(group, failure, phase, FailureOrigin::named);
}

/// Reports progress between parts of long work. Throws the group's failure if it has one.
void go_on(Group& group);

/// During its lifetime, a stop request makes Error(cancelled) the failure of the group, so that all ranks end. Once
/// `too_late` is set, a stop request has no effect.
using FailOnStop = std::stop_callback<std::function<void()>>;
FailOnStop fail_on_stop(Group& group, const std::stop_token& stop, const std::atomic<bool>* too_late = nullptr);

}  // namespace muster

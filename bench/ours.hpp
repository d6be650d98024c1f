// SPDX-License-Identifier: Apache-2.0
#pragma once
// The library as a contender.

#include <memory>
#include <span>
#include <string>

#include "bench/harness/measure.hpp"
#include "bench/harness/meeting.hpp"
#include "bench/harness/report.hpp"
#include "muster/sync_group.hpp"

namespace bench {

/// A group of the ranks of the meeting; no two calls of a run give the same key. Collective.
std::shared_ptr<muster::SyncGroup> make_group(const Meeting& meeting);

/// get_tensors_parallel over one group: after the warm-up its memory is there.
/// `exchanges` have been made when it returns, so that its memory is taken. `group`: null for one of its own.
/// Collective.
Contender pooled_contender(Meeting& meeting, std::span<std::byte> source, std::shared_ptr<PhaseLog> phases,
                           int exchanges, std::shared_ptr<muster::SyncGroup> group = nullptr);

/// The same over a new group each time, so that every exchange is a first one. Making the group is not timed.
Contender first_contender(Meeting& meeting, std::span<std::byte> source, std::shared_ptr<PhaseLog> phases);

}  // namespace bench

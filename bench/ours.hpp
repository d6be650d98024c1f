// SPDX-License-Identifier: Apache-2.0
#pragma once
// The library as a contender.

#include <memory>
#include <span>
#include <string>

#include "bench/harness/measure.hpp"
#include "bench/harness/meeting.hpp"
#include "bench/harness/report.hpp"
#include "muster/group.hpp"

namespace bench {

/// Makes a group of the ranks of the bench. Every call uses a new key. Collective.
std::shared_ptr<muster::Group> make_group(const Meeting& meeting);

/// Measures get_tensors_parallel over one group. It makes `exchanges` exchanges before it returns, so that the memory
/// is allocated. `group` may be null; then it makes its own. Collective.
Contender pooled_contender(Meeting& meeting, std::span<std::byte> source, std::shared_ptr<PhaseLog> phases,
                           int exchanges, std::shared_ptr<muster::Group> group = nullptr);

/// Measures get_tensors_parallel over a new group each time, so that every exchange is a first one. The time to make
/// the group is not included.
Contender first_contender(Meeting& meeting, std::span<std::byte> source, std::shared_ptr<PhaseLog> phases);

}  // namespace bench

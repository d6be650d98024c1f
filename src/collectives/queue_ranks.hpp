// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who is in a queue: the ranks of a group, or those and one process more that writes.
//
//  1. All ranks of the group agree about the options.
//  2. Without a writer outside, the queue's group is a duplicate.
//  3. With one, ranks and writer make a local group by the key in the handle: first the ranks in their order, then the
//     writer. All of these agree about the options.
// So a writer outside dies, hangs and is refused as a rank is.

#include <memory>

#include "muster/message_queue.hpp"
#include "muster/sync_group.hpp"

namespace muster::collectives {

struct QueueRanks {
  std::shared_ptr<SyncGroup> group;
  int writer = 0;
};

/// Collective. Throws as MessageQueue's constructor.
QueueRanks queue_ranks(SyncGroup& group, const QueueOptions& options);
/// The same for the writer outside.
QueueRanks queue_ranks_from_outside(const QueueOptions& options);

}  // namespace muster::collectives

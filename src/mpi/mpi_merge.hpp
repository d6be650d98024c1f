// SPDX-License-Identifier: Apache-2.0
#pragma once
// Merging across hosts: ranks of other hosts send to the first rank by MPI, those of its own host write what they would
// send into windows of shared memory (merge_rings.hpp).
//
//  1. offer: every rank checks that its tensor can be merged; the first rank tells what memory it has and may take. All
//     see from the records whether the merged tensor and the window fit (receive_need.hpp).
//  2. All compute the same layout from the records. A sender says that it is ready; the first rank takes memory, opens
//     receives and says yes to all, or no to all.
//  3. A tensor whose bytes lie together in the merged one (concat along the first dimension, stack) is received where
//     it belongs. Any other comes through the window: two pieces a sender, whose rows are copied to their places while
//     the next piece is under way.
//  4. Of max and sum the window holds a piece of every sender: when all have come they are reduced into the merged
//     tensor, the sources in the order of the list, so that the bits are those of the other routes.
//  5. The first rank's own tensor is copied meanwhile.
//  6. A sender of the first rank's host has no receives: its pieces are windows of a ring, taken like the others.
// So the first rank has the merged tensor and the window, never the senders' tensors.

#include <memory>

#include "src/gather/route.hpp"
#include "src/mpi/mpi_group.hpp"

namespace muster::mpi {

std::unique_ptr<gather::Transfer> make_mpi_merge(const gather::Call& call, MpiGroup& group);

}  // namespace muster::mpi

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process group of a communicator. It is an attribute of the communicator, made at its first collective and
// destroyed with it.
//
//  1. Ranks of one host (MPI_COMM_TYPE_SHARED) rendezvous with a key that the first of them has sent to the others over
//     MPI.
//  2. All ranks learn whether all have made the group. If one has not, the communicator has no group.
//  3. A rank that waits for others in the group lets MPI make progress, because the others may wait for messages of
//     this rank.

#include <mpi.h>

#include "muster/process_group.hpp"

namespace muster::pmpi {

/// Returns null if the communicator has no group: it has one rank, is on several hosts, or is an intercommunicator. The
/// result is the same on all ranks. The first call is collective over the communicator.
ProcessGroup* group_of(MPI_Comm comm) noexcept;

}  // namespace muster::pmpi

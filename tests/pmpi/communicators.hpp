// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process group of a communicator: an attribute of it, made at its first collective and gone with it.
//
//  1. Ranks of one host (MPI_COMM_TYPE_SHARED) meet by a key that the first of them has told the others by MPI.
//  2. All hear whether all have made the group. If one has not, the communicator has none.
//  3. A rank that waits for others in the group lets MPI go on meanwhile: what they wait for may be this rank's.

#include <mpi.h>

#include "muster/process_group.hpp"

namespace muster::pmpi {

/// Null if the communicator has none: it has one rank, is on several hosts, or connects two groups. The same on all
/// ranks. The first call is collective over the communicator.
ProcessGroup* group_of(MPI_Comm comm) noexcept;

}  // namespace muster::pmpi

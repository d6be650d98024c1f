// SPDX-License-Identifier: Apache-2.0
#pragma once
// The families of this process, and how they end with MPI: a callback that MPI_Finalize makes before it does anything
// else (an attribute of MPI_COMM_SELF) ends all groups that still are, and waits until all ranks' have.
//
// MPICH 4.0 over UCX and TCP has a race in MPI_Finalize: a rank takes leave of each other one that it has ever sent to
// and waits for its answer, but one that has had all its own answers gives no more. Who takes leave too late, or of a
// rank that need not take leave of it, is left waiting for ever: programs of ten lines hang at one end in three. Ranks
// answer whenever they call MPI. So where there are several hosts
//  - whoever sends to a rank of another host is sent to by it, too: collective operations are those whose messages go
//    both ways between two ranks;
//  - when all have parted, all leave MPI alone for a while: the last one hears of it meanwhile, and when they go on
//    nobody has answered a leave before taking his own.

#include <memory>
#include <string>

#include "src/mpi/family.hpp"

namespace muster::mpi {

/// Kept until it has ended, and from now on ended by MPI_Finalize at the latest. Throws Error(io).
void keep(std::shared_ptr<Family> family);

/// Lets families without groups get on with their end. Never waits. Called by a thread that may call MPI now.
void advance_endings() noexcept;

/// Ends all groups of this process and waits for the other ranks to do so: up to a group's timeout; 2 s where one has
/// failed, or where a rank of this host is dead. Returns whether all have ended in order: then MPI_Finalize returns, if
/// nothing else of MPI is called before it.
bool end_all() noexcept;

}  // namespace muster::mpi

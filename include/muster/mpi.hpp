// SPDX-License-Identifier: Apache-2.0
#pragma once
// mpi_group(): the ranks of an MPI communicator, on one host or on many. Only this header of the library has MPI's
// types; programs that include it link libmuster-mpi (pkg-config muster-mpi).

#include <mpi.h>

#include <chrono>
#include <memory>
#include <optional>

#include "muster/sync_group.hpp"

namespace muster {

struct MpiGroupOptions {
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the meeting, and the group's default after it
};

/// A group of the ranks of `comm`, in its order. The communicator is duplicated: the caller's own messages and the
/// group's never meet. MPI calls are made by the thread that uses the group: with MPI_THREAD_SINGLE and FUNNELED that
/// is the one that made it, with SERIALIZED any, one at a time for the whole process (the caller sees to that), with
/// MULTIPLE any. Ranks that share a host meet in shared memory there, and what they say to each other does not go
/// through MPI.
///
/// MPI's errors are returned, never fatal, and become Error(io); the error handler of `comm` is as it was. A group may
/// go whenever it likes, on each rank at another time; those that still are end when MPI_Finalize begins, which waits
/// then for the other ranks' to end: up to the group's timeout, 2 s after a failure. After a failed wait, memory that
/// MPI may still touch is kept until the process ends, but for tensors that the caller has lent: where such were being
/// sent, nothing here calls MPI in this process any more, and whoever else does (MPI_Finalize, too) must leave them
/// where they are. If a rank has died MPI_Finalize does not return (MPICH waits for the dead), so end the process
/// without it.
///
/// Collective over `comm`. Throws Error(argument) if MPI is not initialised or has ended, or `comm` is
/// MPI_COMM_NULL or an inter-communicator; Error(unsupported) if MPI may not be called from this thread;
/// Error(timeout) if ranks do not come; Error(version) if ranks run different versions of Muster or have
/// different byte orders.
std::shared_ptr<SyncGroup> mpi_group(MPI_Comm comm, const MpiGroupOptions& options = {});

}  // namespace muster

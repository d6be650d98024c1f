// SPDX-License-Identifier: Apache-2.0
#pragma once
// mpi_group(): the ranks of an MPI communicator, on one or several hosts. This is the only header of the library that
// uses MPI types. Programs that include it link libmuster-mpi (pkg-config muster-mpi).

#include <mpi.h>

#include <chrono>
#include <memory>
#include <optional>

#include "muster/group.hpp"

namespace muster {

/// Options of mpi_group().
struct MpiGroupOptions {
  /// For the rendezvous; afterwards the default deadline of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Returns a group of the ranks of `comm`, in its order. Collective over `comm`. The communicator is duplicated, so
/// messages of the caller and of the group are separate. Ranks on the same host use shared memory, and their data is
/// not sent over MPI.
///
/// Threads: the thread that uses the group makes the MPI calls. With MPI_THREAD_SINGLE and FUNNELED it must be the
/// thread that created the group. With SERIALIZED it may be any thread, but the caller ensures that the process makes
/// one MPI call at a time. With MULTIPLE it may be any thread.
///
/// Errors of MPI are returned as Error(io) and are never fatal; the error handler of `comm` is not changed. Each rank
/// may destroy the group at a different time. When MPI_Finalize begins, it destroys the remaining groups and waits for
/// the other ranks to do the same: up to the timeout of the group, or 2 s after a failure.
///
/// After a failed wait, memory that MPI may still access is kept until the process exits. Memory that the caller has
/// lent cannot be kept. If such memory was being sent, Muster makes no further MPI call in this process. Other MPI
/// calls, including MPI_Finalize, are then safe only while the caller keeps that memory in place. If a rank has died,
/// MPI_Finalize does not return (MPICH waits for the dead rank). End the process without it.
///
/// Throws Error(invalid_argument) if MPI is not initialized or has been finalized, or `comm` is MPI_COMM_NULL or an
/// inter-communicator. Throws Error(unsupported) if this thread may not call MPI, and Error(timeout) if ranks do not
/// arrive. Throws Error(version) if ranks have different versions of Muster or different byte orders.
std::shared_ptr<Group> mpi_group(MPI_Comm comm, const MpiGroupOptions& options = {});

}  // namespace muster

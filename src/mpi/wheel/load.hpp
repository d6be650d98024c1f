// SPDX-License-Identifier: Apache-2.0
#pragma once
// The MPI of a process that uses a wheel.
//
//  1. An MPI that the program has initialised, for example with mpi4py.
//  2. Otherwise the MPI of the process manager that has started this rank: MPICH for PMI, Open MPI for its own mpiexec,
//     and Open MPI or else MPICH for PMIx.
//  3. Otherwise MPICH, or else Open MPI. This serves `muster doctor`.
//
// A wheel has one library per MPI. The library for the chosen MPI fills the table of calls.h. The choice is final.

#include "src/mpi/wheel/calls.h"

namespace muster::mpi {

/// Loads MPI if that has not happened. Throws Error(unsupported).
const muster_mpi_calls& calls();

/// Returns null if the program has initialised no MPI, or if its MPI cannot be used.
const muster_mpi_calls* calls_in_process() noexcept;

}  // namespace muster::mpi

// SPDX-License-Identifier: Apache-2.0
#pragma once
// How world() makes a group of MPI's ranks: by libmuster-mpi, which knows MPI and registers its way here when it is
// loaded. A program that is linked with it has it from the start; for others it is loaded where the environment says
// that MPI has started them.

#include <functional>
#include <memory>
#include <string>

#include "muster/sync_group.hpp"
#include "src/sync/start.hpp"

namespace muster::sync {

struct MpiSupport {
  /// Ranks of MPI_COMM_WORLD; 0 if the program has not initialised MPI, or ended it.
  std::function<int()> ranks;
  /// The group of MPI_COMM_WORLD. Initialises MPI where the program has not; then it is finalised at exit. Throws as
  /// world(), and Error(unsupported) if MPI does not find the ranks that the environment tells of.
  std::function<std::shared_ptr<SyncGroup>(const Start& start)> make_world;
  /// What the library was built for and what is there, for `muster doctor`: "MPICH Version 4.0.2".
  std::function<std::string()> describe;
};

/// Called when libmuster-mpi is loaded.
void set_mpi_support(MpiSupport support);

/// Null if it was not loaded yet.
const MpiSupport* mpi_support();

/// Loads the library of this version unless it is there: beside libmuster, else where the system looks. Throws
/// Error(unsupported).
const MpiSupport& require_mpi();

}  // namespace muster::sync

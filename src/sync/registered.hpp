// SPDX-License-Identifier: Apache-2.0
#pragma once
// How world() makes a group of ranks on several hosts without knowing what such a group is made of: the layers that can
// register their ways here when their library is loaded. libmuster-mpi is there from the start in a program that is
// linked with it; for others it is loaded if the environment says that MPI has started them.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "muster/sync_group.hpp"
#include "src/sync/start.hpp"

namespace muster::sync {

struct DistantWorld {
  std::string place;  ///< where the ranks meet: a directory (MUSTER_WORKSPACE), or an address (Start::meeting)
  std::string key;
  int rank = 0;
  int size = 1;
};
using WorldMaker = std::function<std::shared_ptr<SyncGroup>(const DistantWorld&)>;
enum class MeetBy : std::uint8_t { files, tcp };

void set_world_maker(MeetBy by, WorldMaker maker);

struct MpiSupport {
  /// Ranks of MPI_COMM_WORLD; 0 if the program has not initialised MPI, or ended it.
  std::function<int()> ranks;
  /// The group of MPI_COMM_WORLD. Initialises MPI where the program has not; then it is finalised at exit. Throws as
  /// world(), and Error(unsupported) if MPI does not find the ranks that the environment tells of.
  std::function<std::shared_ptr<SyncGroup>(const Start& start)> make_world;
  /// What the library was built for and what is there, for `muster doctor`: "MPICH Version 4.0.2".
  std::function<std::string()> describe;
};

void set_mpi_support(MpiSupport support);

/// Null if it was not loaded yet.
const MpiSupport* mpi_support();

/// Loads the library of this version unless it is there: beside libmuster, else where the system looks. Throws
/// Error(unsupported).
const MpiSupport& require_mpi();

}  // namespace muster::sync

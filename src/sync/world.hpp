// SPDX-License-Identifier: Apache-2.0
#pragma once
// world(): how this process was started, as it concludes from the environment, and who makes the group.
//
//  0. MUSTER_ALONE=1: the process is alone, whatever else is set.
//  1. A process manager of MPI that still listens (PMI_FD is an open socket, PMI_PORT, PMIX_RANK, OMPI_COMM_WORLD_SIZE)
//     and has started more than one process: MPI. Descriptors tell who is nearer: torchrun closes them for its workers,
//     and `muster run` takes these variables from its ranks' environment.
//  2. RANK and WORLD_SIZE: `muster run`, torchrun, or set by hand. All ranks are here if LOCAL_WORLD_SIZE says so, and
//     if it says nothing and MASTER_ADDR is no other host's address than this one's own 127.0.0.1.
//  3. Both: the same rank of the same number of ranks is MPI (a script has set one from the other); inside of `muster
//     run` MPI was started later; inside of torchrun, torchrun was. Anything else is an error.
//  4. A step of Slurm with several tasks (SLURM_STEP_NUM_TASKS; SLURM_NTASKS is also set in the shell of a job).
//  5. Else the process is alone.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "muster/sync_group.hpp"

namespace muster::sync {

struct Surroundings {
  std::function<std::optional<std::string>(const char* name)> variable;
  /// Whether a descriptor is an open socket.
  std::function<bool(int descriptor)> is_socket;
};

/// Of this process.
Surroundings own_surroundings();

enum class StartedBy : unsigned char { alone, launcher, mpi, slurm };

struct Start {
  StartedBy by = StartedBy::alone;
  int rank = 0;
  int size = 1;           ///< 0: only MPI knows
  bool is_here = true;    ///< all ranks are known to be on this host
  bool is_apart = false;  ///< some ranks are known to be on others
  std::string key = {};   ///< tells the job from others; not of MPI
  /// HOST:PORT where ranks that are not known to be here meet by TCP; empty: none is known. The host is MASTER_ADDR, or
  /// the first of a step's nodes; the port MUSTER_PORT, else MASTER_PORT + 1 (torchrun's own store is often at
  /// MASTER_PORT), or of a step 20000 and something that follows from its number.
  std::string meeting = {};
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the rendezvous; empty: the default
  std::string said = {};  ///< the variables that say so, for messages: "PMI_RANK=1 PMI_SIZE=4"
};

/// Throws Error(argument) on variables that do not parse, are not complete or contradict each other.
Start find_start(const Surroundings& surroundings);

/// muster::world(), whose rendezvous takes at most `timeout` if this call makes it. The deadline of the group's later
/// calls is the default all the same.
std::shared_ptr<SyncGroup> world_within(std::optional<std::chrono::milliseconds> timeout);

/// The next world() looks at the environment again, unless the program has set the world.
void forget_world();

/// Whether a variable of a launcher must not be inherited by the ranks that it starts: what a process manager of MPI
/// told the launcher of itself, MUSTER_ALONE, and what a launcher has told this process for itself alone.
bool is_own_variable(std::string_view name) noexcept;

// How world() makes a group of ranks on several hosts without knowing what such a group is made of: the layers that can
// register their ways here when their library is loaded. libmuster-mpi is there from the start in a program that is
// linked with it; for others it is loaded if the environment says that MPI has started them.

struct DistantWorld {
  std::string place;  ///< where the ranks meet: a directory (MUSTER_WORKSPACE), or an address (Start::meeting)
  std::string key;
  int rank = 0;
  int size = 1;
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the rendezvous; empty: the default
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
// world(): determines from the environment how this process was started, and creates the group.
//
//  0. MUSTER_STANDALONE=1: the process is alone, whatever else is set.
//  1. MPI, if an MPI process manager that still listens (PMI_FD is an open socket, PMI_PORT, PMIX_RANK,
//     OMPI_COMM_WORLD_SIZE) has started more than one process. The open descriptor shows which launcher started this
//     process directly. torchrun closes descriptors for its workers, and `muster run` removes these variables from its
//     ranks' environment.
//  2. RANK and WORLD_SIZE: set by `muster run`, torchrun, or by hand. All ranks are on this host if LOCAL_WORLD_SIZE
//     equals WORLD_SIZE, or if LOCAL_WORLD_SIZE is unset and MASTER_ADDR is unset or a loopback address.
//  3. Both 1 and 2: if rank and size agree, MPI (a script has set one from the other). Inside `muster run`, MPI was
//     started later; inside torchrun, torchrun was. Anything else is an error.
//  4. A step of Slurm with several tasks (SLURM_STEP_NUM_TASKS; SLURM_NTASKS is also set in the shell of a job).
//  5. Otherwise the process is alone.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "muster/group.hpp"

namespace muster::group {

struct Surroundings {
  std::function<std::optional<std::string>(const char* name)> variable;
  /// Returns whether a descriptor is an open socket.
  std::function<bool(int descriptor)> is_socket;
};

/// Returns the environment and the descriptors of this process.
Surroundings own_surroundings();

enum class StartedBy : unsigned char { alone, launcher, mpi, slurm };

/// The kind of the process manager of MPI, by its variables. PMI is that of MPICH; both MPIs know PMIx.
enum class ProcessManager : unsigned char { none, pmi, open_mpi, pmix };

struct Start {
  StartedBy by = StartedBy::alone;
  ProcessManager manager = ProcessManager::none;
  int rank = 0;
  int size = 1;           ///< 0: only MPI knows it
  bool is_here = true;    ///< all ranks are known to be on this host
  bool is_apart = false;  ///< some ranks are known to be on other hosts
  std::string key = {};   ///< identifies the job; empty for MPI
  /// HOST:PORT of the TCP rendezvous of ranks that are not known to be on this host; empty: unknown. The host is
  /// MASTER_ADDR, or the first node of a Slurm step. The port is MUSTER_MASTER_PORT, else MASTER_PORT + 1, because
  /// torchrun's own store often uses MASTER_PORT. For a Slurm step it is 20000 plus a number derived from the step's
  /// ID.
  std::string meeting = {};
  std::optional<std::chrono::milliseconds> timeout = {};  ///< limit of the rendezvous; empty: the default
  std::string said = {};  ///< the variables that the result follows from, for messages: "PMI_RANK=1 PMI_SIZE=4"
};

/// Throws Error(invalid_argument) if variables do not parse, are incomplete or contradict each other.
Start find_start(const Surroundings& surroundings);

/// Returns muster::world(). If this call creates it, `timeout` limits the rendezvous; later calls of the group use the
/// default timeout.
std::shared_ptr<Group> world_within(std::optional<std::chrono::milliseconds> timeout);

/// Makes the next world() examine the environment again, unless the program has set the world.
void forget_world();
/// If `group` is the world, also one that the program has set, the next call of world() reads the environment again.
void leave_world(const Group& group);

/// Returns whether ranks must not inherit this variable from their launcher. These are the variables with which an MPI
/// process manager identifies the launcher itself, MUSTER_STANDALONE, and variables that a launcher has set for this
/// process only.
bool is_own_variable(std::string_view name) noexcept;

// Creation of groups of ranks on several hosts. world() does not depend on the layers that implement such groups; they
// register their functions here when their library is loaded. A program that is linked with libmuster-mpi has it from
// the start. For other programs it is loaded if the environment shows that MPI started them.

struct MpiSupport {
  /// Returns the number of ranks of MPI_COMM_WORLD; 0 if the program has not initialised MPI, or has finalised it.
  std::function<int()> ranks;
  /// Creates the group of MPI_COMM_WORLD. If the program has not initialised MPI, initialises it and finalises it at
  /// exit. Throws as world(), and Error(unsupported) if MPI does not find the ranks that the environment describes.
  std::function<std::shared_ptr<Group>(const Start& start)> make_world;
  /// Describes the MPI library of the build and the one that was found, for `muster doctor`: "MPICH Version 4.0.2".
  std::function<std::string()> describe;
};

void set_mpi_support(MpiSupport support);

/// Returns null if the library has not been loaded yet.
const MpiSupport* mpi_support();

/// Loads the libmuster-mpi of this version unless it is loaded: from the directory of libmuster, else from the system's
/// search path. Throws Error(unsupported).
const MpiSupport& require_mpi();

}  // namespace muster::group

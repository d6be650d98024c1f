// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starts a function of this program, or a command, as the ranks of a job. If a rank fails, launch_subprocesses() throws
// its error. Semantics: torch_distributed of ml-starter (MultiprocessConfig, launch_subprocesses, init_and_run). In
// contrast to it, port races are avoided: the launcher listens at the rendezvous address before the ranks start, and
// ports stay reserved.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/launch.hpp"

namespace muster {

/// How rank processes are created. Both methods start them with the environment and descriptors of a newly executed
/// program.
enum class LaunchMethod : std::uint8_t {
  forkserver,  ///< the program is started once more; that process has no threads and forks the ranks
  spawn,       ///< the program is started once more per rank
};

/// Describes a rank and its job. resolve() fills in unset members with the defaults named here.
struct MultiprocessConfig {
  int rank = -1;                       ///< rank of this process; -1 in a launcher
  int local_rank = -1;                 ///< rank among the ranks of this host
  std::optional<int> world_size = {};  ///< default: the number of GPUs that this process sees, 1 if there are none
  std::optional<int> local_world_size = {};  ///< default: world_size
  /// The host of rank 0, for MASTER_ADDR.
  std::string master_addr = "127.0.0.1";
  std::optional<int> master_port = {};  ///< default: 29500, or another free port if that is in use
  /// The rendezvous method, as dist::InitOptions::init_method.
  std::string init_method = "env://";
  // Numbers of ranks per model-parallel group and per pipeline, for init_parallelism().
  /// Number of ranks per model-parallel group.
  int model_parallelism = 1;
  /// Number of ranks per pipeline.
  int pipeline_parallelism = 1;
  // Backends, with the names of dist::init_process_group(). Empty: default_backend(). For the three parallel backends,
  // empty means `backend`.
  /// The backend of the group of all ranks.
  std::string backend = {};
  /// The backend of the model-parallel groups.
  std::string model_parallel_backend = {};
  /// The backend of the pipelines.
  std::string pipeline_parallel_backend = {};
  /// The backend of the data-parallel groups.
  std::string data_parallel_backend = {};
  /// How the processes of the ranks are created.
  LaunchMethod launch_method = LaunchMethod::forkserver;
  /// Set by resolve(). While it exists, no other program can use master_port, except programs that set SO_REUSEADDR and
  /// listen.
  std::shared_ptr<const void> port_holder = {};

  /// Fills in the unset members. Local. Throws Error(invalid_argument) if the sizes do not multiply to the world size,
  /// ranks are invalid, a backend is unknown, or another program uses the port.
  void resolve();
};

/// Returns the backend for calls that name none: the value of set_distributed_backend(), else default_backend(). Local.
[[nodiscard]] std::string get_distributed_backend();
/// Sets the default backend of this process. Local. Throws Error(invalid_argument) if the backend is unknown.
void set_distributed_backend(std::string_view backend);
/// Returns TORCH_DISTRIBUTED_BACKEND if it is set. Otherwise returns "nccl" if this process sees GPUs and has
/// libmuster-cuda, else "tcp". Local.
[[nodiscard]] std::string default_backend();
/// Calls dist::init_process_group() with `backend`, or with get_distributed_backend() if it is empty. Collective.
void init_process_group_from_backend(std::string_view backend = {});

/// Makes this process a rank of the job. Collective; returns when all ranks have arrived. It sets the environment
/// variables of the rank (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and calls
/// dist::init_process_group(). `config` must be resolved and have rank and local_rank. The program selects the GPU of a
/// rank itself. Throws as dist::init_process_group().
void init_dist(const MultiprocessConfig& config);

/// A function that each rank runs.
using RankFunction = void (*)(std::span<const std::string> arguments);
/// Calls init_dist(), init_parallelism() (muster/parallel_groups.hpp) and the function, and then destroys the groups.
/// Collective.
void init_and_run(RankFunction function, const MultiprocessConfig& config, std::span<const std::string> arguments = {});

/// Registers a function under a name, by which launch_subprocesses() finds it in the processes of the ranks: `const
/// muster::RegisteredFunction training("training", train);` at namespace scope. Throws Error(invalid_argument) if the
/// name is already registered.
class RegisteredFunction {
 public:
  /// Registers `function` under `name`.
  RegisteredFunction(std::string_view name, RankFunction function);
};

/// Runs the launched function in a process that launch_subprocesses() has started, and does not return. In other
/// processes it does nothing. Call it first in main() of a program that launches functions. Exceptions of the function
/// reach the caller of launch_subprocesses().
void run_launched_function();

/// Options of launch_subprocesses().
struct SubprocessOptions {
  std::vector<std::string> arguments = {};  ///< arguments of the function
  /// A registered function that each rank calls first, with the same arguments.
  std::string setup = {};
  /// The number of the first rank that this launcher starts, if other launchers start the other ranks of a larger
  /// world. This launcher starts local_world_size ranks.
  int rank_offset = 0;
  /// A command that is started instead of this program and reaches run_launched_function(), such as an interpreter with
  /// a script. It requires LaunchMethod::spawn.
  std::vector<std::string> program = {};
  /// Options of launch_local(). These are used: environment, output (`inherit` means `lines`), log_directory, tee,
  /// grace, kill_after, timeout. The others are ignored.
  LaunchOptions launch = {};
};

/// Starts config.local_world_size ranks and waits until they exit. Each rank is a separate process, even if there is
/// only one. It calls `options.setup` and init_and_run(). Local; any thread.
///
/// If a rank fails (it throws, exits with a status other than 0, or is killed), the other ranks are ended as by
/// launch_local(). The call then throws an Error with the message, kind, rank, pid and host of the failed rank. If the
/// rank reported no error, the message contains its signal or status and the end of its standard error. If several
/// ranks fail, it is the error that does not name another rank as the cause. Throws Error(timeout) after
/// launch.timeout. No process is left behind.
///
/// Throws Error(invalid_argument), before anything is started, if the function is not registered, the config is
/// invalid, or main() has not called run_launched_function(). Throws Error(cancelled) if the hook of
/// muster/interrupt.hpp ends the wait. The ranks then have `grace` to exit, receive SIGTERM, and SIGKILL after
/// `kill_after`.
void launch_subprocesses(std::string_view function, const MultiprocessConfig& config,
                         const SubprocessOptions& options = {});
/// Starts a command instead of a function. It receives its rank only through the environment. Otherwise as the call
/// above. Throws Error(not_found) if the command does not exist.
void launch_subprocesses(const std::vector<std::string>& command, const MultiprocessConfig& config,
                         const SubprocessOptions& options = {});

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starting a function of this program, or a command, as the ranks of a job: launch_subprocesses() throws what the rank
// that failed has said. Semantics: ml-starter's torch_distributed (MultiprocessConfig, launch_subprocesses,
// init_and_run), without its races: where ranks meet is listened at before they start, and ports stay reserved.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/launch.hpp"

namespace muster {

/// How the processes of ranks are made. Each has the environment and descriptors that exec leaves either way.
enum class LaunchMethod : std::uint8_t {
  forkserver,  ///< the program is started once more, and that process, which has no threads, forks the ranks
  spawn,       ///< the program is started once more for each rank
};

/// What a rank needs to know to be one of a job. resolve() finds what is missing.
struct MultiprocessConfig {
  int rank = -1;                             ///< of this process; -1 in a launcher
  int local_rank = -1;                       ///< on this host
  std::optional<int> world_size = {};        ///< the devices that this process sees, 1 if there are none
  std::optional<int> local_world_size = {};  ///< world_size
  std::string master_addr = "127.0.0.1";
  std::optional<int> master_port = {};  ///< 29500, another free one if that is taken
  std::string init_method = "env://";
  // Ranks that share the layers' matrices, and stages that share the layers: init_parallelism().
  int model_parallelism = 1;
  int pipeline_parallelism = 1;
  // Backends by the names of dist::init_process_group(). Empty: default_backend(); `backend` for those of the parts.
  std::string backend = {};
  std::string model_parallel_backend = {};
  std::string pipeline_parallel_backend = {};
  std::string data_parallel_backend = {};
  LaunchMethod launch_method = LaunchMethod::forkserver;
  /// Of resolve(): as long as it lives, master_port is nobody else's, but for programs that set SO_REUSEADDR and
  /// listen.
  std::shared_ptr<const void> port_holder = {};

  /// Local. Throws Error(argument) on sizes that do not multiply out, ranks that cannot be, a backend that is none, and
  /// a port that is another program's.
  void resolve();
};

/// The backend of calls that name none: what set_distributed_backend() has set, else default_backend().
[[nodiscard]] std::string get_distributed_backend();
/// Of this process. Throws Error(argument) if there is no such backend.
void set_distributed_backend(std::string_view backend);
/// TORCH_DISTRIBUTED_BACKEND if it is set; "nccl" if this process sees devices and has libmuster-cuda; else "tcp".
[[nodiscard]] std::string default_backend();
/// Collective. dist::init_process_group() with that backend, or the one of calls that name none.
void init_process_group_from_backend(std::string_view backend = {});

/// Collective. Makes this process a rank of the job: sets the variables of the environment that tell of it (RANK,
/// LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), calls dist::init_process_group(), and returns
/// when all ranks have come. `config` has been resolved and has rank and local_rank. Which device a rank uses is the
/// program's choice. Throws as these.
void init_dist(const MultiprocessConfig& config);

/// What runs in each rank.
using RankFunction = void (*)(std::span<const std::string> arguments);
/// Collective. init_dist(), init_parallelism() (muster/parallel_groups.hpp) and the function; then the groups end.
void init_and_run(RankFunction function, const MultiprocessConfig& config, std::span<const std::string> arguments = {});

/// Gives a function a name that launch_subprocesses() finds in the ranks, which are processes of their own:
/// `const muster::RegisteredFunction training("training", train);` outside of functions. Throws Error(argument) if
/// there is another one of that name.
class RegisteredFunction {
 public:
  RegisteredFunction(std::string_view name, RankFunction function);
};

/// The first line of main() in a program that launches functions: in a process that launch_subprocesses() has started
/// it runs what that is for, and does not return. In others it does nothing. What a function throws reaches the caller
/// of launch_subprocesses().
void run_launched_function();

struct SubprocessOptions {
  std::vector<std::string> arguments = {};  ///< of the function
  /// A registered function that each rank calls before all else, with the same arguments.
  std::string setup = {};
  /// The first rank that is started here, of a larger world whose other ranks others start: local_world_size ranks.
  int rank_offset = 0;
  /// What is started in place of this program: a command that comes to run_launched_function(), such as an interpreter
  /// with a script. Its functions need LaunchMethod::spawn.
  std::vector<std::string> program = {};
  /// As launch_local() has them: environment, output (`inherit` is `lines`), log_directory, tee, grace, kill_after,
  /// timeout. The others are not looked at.
  LaunchOptions launch = {};
};

/// Starts config.local_world_size ranks and waits for their end; one rank, too, is a process of its own. Each calls
/// `options.setup` and init_and_run().
///
/// If a rank fails (it throws, ends with a status that is not 0, or is killed), the others are ended as launch_local()
/// does, and Error is thrown with that rank's own words, kind, number, pid and host; with signal or status and the end
/// of what it wrote to standard error if it has said nothing else. Of several failures it is the one that blames no
/// other rank. Error(timeout) after launch.timeout. No process is left.
///
/// Local; any thread. Throws Error(argument) before anything is started if the function is not registered or the
/// config cannot be, or if main() has not called run_launched_function(); Error(cancelled) where the hook of
/// muster/interrupt.hpp ends the wait: the ranks have `grace` then, SIGTERM, `kill_after`, SIGKILL.
void launch_subprocesses(std::string_view function, const MultiprocessConfig& config,
                         const SubprocessOptions& options = {});
/// The same with a command, which has the environment alone. Throws Error(not_found) if it is not there.
void launch_subprocesses(const std::vector<std::string>& command, const MultiprocessConfig& config,
                         const SubprocessOptions& options = {});

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
// world(): finds out how this process was started, and creates the group. Step numbers are those of world.hpp.

#include "src/rendezvous/world.hpp"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <mutex>
#include <string_view>
#include <utility>

#include "muster/error.hpp"
#include "muster/tcp.hpp"
#include "muster/version.hpp"
#include "muster/workspace.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/library.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace group {
namespace {

class EnvironmentReader {
 public:
  explicit EnvironmentReader(const Surroundings& surroundings) : surroundings_(surroundings) {}

  [[nodiscard]] std::optional<std::string> text(const char* name) const { return surroundings_.variable(name); }
  [[nodiscard]] bool has(const char* name) const { return text(name).has_value(); }
  [[nodiscard]] std::string text_or_nothing(const char* name) const { return text(name).value_or(""); }
  [[nodiscard]] std::optional<int> number(const char* name) const {
    const auto found = text(name);
    if (!found) return std::nullopt;
    int value = 0;
    const auto [end, error] = std::from_chars(found->data(), found->data() + found->size(), value);
    if (error != std::errc{} || end != found->data() + found->size() || value < 0)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("{} is {}: it must be a number of at least 0", name, in_quotes(*found)));
    return value;
  }
  [[nodiscard]] bool is_socket(int descriptor) const { return surroundings_.is_socket(descriptor); }

 private:
  const Surroundings& surroundings_;
};

/// Sets rank and size from two variables. Throws Error(invalid_argument) if the values contradict each other.
void tell(Start& start, const char* rank_name, int rank, const char* size_name, int size) {
  start.rank = rank;
  start.size = size;
  start.said = fmt::format("{}={}, {}={}", rank_name, rank, size_name, size);
  if (start.size < 1 || start.rank >= start.size)
    throw Error(ErrorKind::invalid_argument,
                out_of_range_text(std::string(rank_name) + ": rank", start.rank, start.size));
}

/// Step 1. PMI and PMIx give each process its rank. The channel to the process manager shows whether the manager still
/// listens.
std::optional<Start> started_by_mpi(const EnvironmentReader& environment) {
  Start start;
  start.by = StartedBy::mpi;
  start.is_here = false;
  const auto rank = environment.number("PMI_RANK");
  const auto size = environment.number("PMI_SIZE");
  if (rank && size) {
    const auto descriptor = environment.number("PMI_FD");
    if (descriptor ? environment.is_socket(*descriptor)
                   : environment.has("PMI_PORT") || environment.has("PMI_CONTROL_PORT")) {
      start.manager = ProcessManager::pmi;
      tell(start, "PMI_RANK", *rank, "PMI_SIZE", *size);
      return start;
    }
  }
  const auto open_rank = environment.number("OMPI_COMM_WORLD_RANK");
  const auto open_size = environment.number("OMPI_COMM_WORLD_SIZE");
  if (open_rank && open_size) {
    start.manager = ProcessManager::open_mpi;
    tell(start, "OMPI_COMM_WORLD_RANK", *open_rank, "OMPI_COMM_WORLD_SIZE", *open_size);
    return start;
  }
  if (const auto pmix_rank = environment.number("PMIX_RANK")) {
    start.manager = ProcessManager::pmix;
    start.rank = *pmix_rank;
    // PMIx gives the number of processes only through function calls.
    start.size = environment.number("SLURM_STEP_NUM_TASKS").value_or(0);
    start.said = fmt::format("PMIX_RANK={}", *pmix_rank);
    return start;
  }
  return std::nullopt;
}

bool is_loopback(std::string_view host) {
  return host == "localhost" || host.starts_with("127.") || host == "::1";
}

std::string address_text(const std::string& host, std::int64_t port) {
  if (port < 1 || port > UINT16_MAX)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("port {} is out of range (valid: 1 to 65535). Set MUSTER_MASTER_PORT to a free port of {}",
                            port, in_quotes(host)));
  const bool is_bracketed = host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", is_bracketed ? "[" : "", host, is_bracketed ? "]" : "", port);
}

/// Step 2.
std::optional<Start> started_by_launcher(const EnvironmentReader& environment) {
  const auto rank = environment.number("RANK");
  const auto size = environment.number("WORLD_SIZE");
  if (!rank && !size) return std::nullopt;
  if (!rank || !size)
    throw Error(ErrorKind::invalid_argument, fmt::format("the environment has {} but not {}. Set both (muster run, "
                                                         "torchrun and init_dist() do), or unset it to run alone",
                                                         rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK"));
  Start start;
  start.by = StartedBy::launcher;
  tell(start, "RANK", *rank, "WORLD_SIZE", *size);
  const auto here = environment.number("LOCAL_WORLD_SIZE");
  start.is_here = here && *here == *size;
  start.is_apart = here && !start.is_here;
  const auto first_host = environment.text("MASTER_ADDR");
  const auto own_port = environment.number("MUSTER_MASTER_PORT");
  const auto master_port = environment.number("MASTER_PORT");
  if (!start.is_here && first_host && (own_port || master_port) && (here || !is_loopback(*first_host)))
    start.meeting = address_text(*first_host, own_port ? *own_port : std::int64_t{*master_port} + 1);
  if (const auto job = environment.text("MUSTER_JOB")) {
    start.key = "job " + *job;
  } else if (environment.has("MASTER_ADDR") && environment.has("MASTER_PORT")) {
    // The port of torchrun's store belongs to torchrun. Its number is used only to distinguish jobs.
    start.key = fmt::format(
        "torchrun {} {} {} {}", environment.text_or_nothing("MASTER_ADDR"), environment.text_or_nothing("MASTER_PORT"),
        environment.text_or_nothing("TORCHELASTIC_RUN_ID"), environment.text_or_nothing("TORCHELASTIC_RESTART_COUNT"));
  }
  return start;
}

/// Returns the first node of Slurm's node list: "a1" for "a[1-3,7],b".
std::string first_node(std::string_view list) {
  std::string name;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      name += list[at];
      continue;
    }
    const std::size_t end = list.find(']', at);
    if (end == std::string_view::npos) return {};
    const std::string_view numbers = list.substr(at + 1, end - at - 1);
    name += numbers.substr(0, numbers.find_first_of("-,"));
    at = end;
  }
  return name;
}

/// Step 4.
std::optional<Start> started_by_slurm(const EnvironmentReader& environment) {
  const auto rank = environment.number("SLURM_PROCID");
  const auto size = environment.number("SLURM_STEP_NUM_TASKS");
  const auto step = environment.text("SLURM_STEP_ID");
  if (!rank || !step || !size || *size < 2) return std::nullopt;
  Start start;
  start.by = StartedBy::slurm;
  tell(start, "SLURM_PROCID", *rank, "SLURM_STEP_NUM_TASKS", *size);
  start.is_here = environment.number("SLURM_STEP_NUM_NODES").value_or(0) == 1;
  start.is_apart = !start.is_here;
  start.key = fmt::format("slurm {} {} {}", environment.text_or_nothing("SLURM_JOB_ID"), *step,
                          environment.text_or_nothing("SLURM_RESTART_COUNT"));
  const std::string first_host =
      environment.text("MASTER_ADDR").value_or(first_node(environment.text_or_nothing("SLURM_STEP_NODELIST")));
  constexpr int first_port = 20000;
  constexpr int ports = 10000;
  const int number =
      environment.number("SLURM_JOB_ID").value_or(0) % ports + environment.number("SLURM_STEP_ID").value_or(0) % ports;
  if (start.is_apart && !first_host.empty())
    start.meeting =
        address_text(first_host, environment.number("MUSTER_MASTER_PORT").value_or(first_port + number % ports));
  return start;
}

std::optional<MpiSupport>& registered() {
  static std::optional<MpiSupport> support;
  return support;
}

}  // namespace

Surroundings own_surroundings() {
  return {.variable = [](const char* name) { return os::environment(name); },
          .is_socket =
              [](int descriptor) {
                struct stat status {};
                return ::fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode);
              }};
}

Start find_start(const Surroundings& surroundings) {
  const EnvironmentReader environment(surroundings);
  // Step 0.
  if (environment.number("MUSTER_STANDALONE").value_or(0) != 0) return {};
  const std::optional<Start> mpi = started_by_mpi(environment);
  const std::optional<Start> launcher = started_by_launcher(environment);
  if (mpi && mpi->size != 1 && launcher) {
    // Step 3.
    const bool is_same = mpi->rank == launcher->rank && mpi->size == launcher->size;
    if (is_same || environment.has("MUSTER_JOB")) return *mpi;
    if (environment.has("TORCHELASTIC_RUN_ID")) return *launcher;
    throw Error(ErrorKind::invalid_argument,
                fmt::format("two launchers set conflicting variables: MPI ({}) and torchrun/muster run ({}). Unset the "
                            "variables of the launcher that did not start this process, or call set_world()",
                            mpi->said, launcher->said));
  }
  if (launcher) return *launcher;
  if (mpi && mpi->size != 1) return *mpi;
  // Processes of Slurm without information from Slurm's own PMI.
  if (const auto slurm = started_by_slurm(environment); slurm && !mpi) return *slurm;
  return {};
}

bool is_own_variable(std::string_view name) noexcept {
  constexpr std::array<std::string_view, 10> beginnings = {
      "PMI_",
      "PMIX_",
      "OMPI_COMM_WORLD_",
      "OMPI_UNIVERSE_SIZE",
      "MPI_LOCAL",
      "HYDI_CONTROL_FD",
      "MUSTER_STANDALONE",
      "MUSTER_LISTENER",
      "MUSTER_LAUNCH_SPEC",
      "MUSTER_MASTER_PORT",
  };
  return std::ranges::any_of(beginnings, [name](std::string_view beginning) { return name.starts_with(beginning); });
}

void set_mpi_support(MpiSupport support) {
  registered() = std::move(support);
}

const MpiSupport* mpi_support() {
  return registered() ? &*registered() : nullptr;
}

const MpiSupport& require_mpi() {
  static ForkMutex mutex;
  const std::lock_guard lock(mutex);
  if (const MpiSupport* support = mpi_support()) return *support;
  const std::string name = fmt::format("libmuster-mpi.so.{}", version());
  // The library registers itself when it is loaded.
  const os::LoadedLibrary library = os::load_library(name);
  if (const MpiSupport* support = mpi_support()) return *support;
  throw Error(
      ErrorKind::unsupported,
      fmt::format("ranks that MPI has started need {} and the MPI that it was built with. Install both, the "
                  "library next to libmuster ({}); or start the ranks with muster run, torchrun or srun; or call "
                  "set_world() with a group of muster::mpi_group() ({})",
                  in_quotes(name), in_quotes(library.file), library.failure),
      {.path = library.file});
}

}  // namespace group

namespace {

/// Creates the world of ranks whose launcher gave them numbers but no connections.
std::shared_ptr<Group> world_of_numbers(const group::Start& start) {
  const auto workspace = os::environment("MUSTER_WORKSPACE");
  const bool can_meet = !(workspace ? *workspace : start.meeting).empty();
  if (start.is_apart && !can_meet)
    throw Error(ErrorKind::unsupported,
                fmt::format("some of the {} ranks are not on this host ({}), and no rendezvous address is set. Set "
                            "MASTER_ADDR and MASTER_PORT to an address of rank 0's host, or MUSTER_WORKSPACE to a "
                            "directory that all ranks see, start the ranks with mpiexec, or call set_world()",
                            start.size, start.said));
  if (start.size == 1) return single_group();
  if (start.key.empty())
    throw Error(
        ErrorKind::invalid_argument,
        "the environment has RANK and WORLD_SIZE but nothing that distinguishes this job from other jobs. Start the "
        "ranks with muster run, torchrun or mpiexec, or set MUSTER_JOB to the same random text on all of them");
  // If a workspace is set and not all ranks are known to be on this host, there are ranks on other hosts.
  if (can_meet && workspace && !start.is_here)
    return file_group(
        {.directory = *workspace, .key = start.key, .rank = start.rank, .size = start.size, .timeout = start.timeout});
  if (can_meet && !workspace)
    return tcp_group(
        {.address = start.meeting, .rank = start.rank, .size = start.size, .timeout = start.timeout, .key = start.key});
  return local_group({.key = start.key, .rank = start.rank, .size = start.size, .timeout = start.timeout});
}

std::shared_ptr<Group> world_of_environment(std::optional<std::chrono::milliseconds> timeout) {
  // If the program has initialised MPI, MPI takes precedence over the environment.
  const group::MpiSupport* mpi = group::mpi_support();
  if (mpi != nullptr && mpi->ranks() > 1)
    return mpi->make_world({.by = group::StartedBy::mpi, .size = 0, .timeout = timeout});
  group::Start start = group::find_start(group::own_surroundings());
  start.timeout = timeout;
  switch (start.by) {
    case group::StartedBy::alone:
      return single_group();
    case group::StartedBy::mpi:
      return group::require_mpi().make_world(start);
    case group::StartedBy::launcher:
    case group::StartedBy::slurm:
      break;
  }
  return world_of_numbers(start);
}

struct World {
  World& operator=(World&&) = delete;
  /// A forked child does not destroy its copy: threads of the parent may have been changing it during the fork.
  ~World() {
    if (process == os::process_id()) return;
    static auto* const the_parents = new std::shared_ptr<Group>;
    the_parents->swap(group);
  }
  ForkMutex making;  // held during the rendezvous
  ForkMutex mutex;   // held only for short times
  std::shared_ptr<Group> group;
  bool is_set = false;  // by the program
  const std::int64_t process = os::process_id();
};

World& the_world() {
  // Destroyed at exit, so that the other ranks see that a rank which exits normally has left and has not died.
  static World world;
  return world;
}

}  // namespace

std::shared_ptr<Group> group::world_within(std::optional<std::chrono::milliseconds> timeout) {
  World& world = the_world();
  const std::lock_guard making(world.making);
  {
    const std::lock_guard lock(world.mutex);
    if (world.group) return world.group;
  }
  auto made = world_of_environment(timeout);
  if (timeout) made->set_timeout(group::default_timeout());
  const std::lock_guard lock(world.mutex);
  // A group that another thread has set meanwhile takes precedence.
  if (!world.group) world.group = std::move(made);
  return world.group;
}

void group::forget_world() {
  World& world = the_world();
  if (const auto lock = world.mutex.lock_unless_abandoned(); lock && !world.is_set) world.group = nullptr;
}

void group::leave_world(const Group& group) {
  World& world = the_world();
  std::shared_ptr<Group> left;  // destroyed without the lock
  const std::lock_guard lock(world.mutex);
  if (world.group.get() != &group) return;
  left = std::move(world.group);
  world.is_set = false;
}

std::shared_ptr<Group> world() {
  return group::world_within(std::nullopt);
}

void set_world(std::shared_ptr<Group> group) {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  world.is_set = group != nullptr;
  world.group = std::move(group);
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
// MultiprocessConfig, backends by name, and the functions that make a process a rank.
#include "muster/compat/multiprocess.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <system_error>

#include "muster/compat/dist.hpp"
#include "muster/log.hpp"
#include "muster/parallel_groups.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/collectives/backend.hpp"
#include "src/compat/dist.hpp"
#include "src/launch/job.hpp"
#include "src/launch/ranks.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, "MultiprocessConfig: " + words);
}

/// Returns the number of devices that this process sees: the devices of the driver that CUDA_VISIBLE_DEVICES does not
/// hide.
int visible_devices() {
  std::error_code failure;
  int devices = 0;
  for (auto entry = std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", failure);
       !failure && entry != std::filesystem::directory_iterator(); entry.increment(failure))
    ++devices;
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? devices : launch::devices_in(visible, devices);
}

struct ChosenBackend {
  ForkMutex mutex;
  std::string name;
};
ChosenBackend& chosen_backend() {
  static ChosenBackend chosen;
  return chosen;
}

/// Returns the named backend, or the default backend if the name is empty.
std::string backend_or(std::string_view named) {
  return named.empty() ? get_distributed_backend() : std::string(named);
}

}  // namespace

void MultiprocessConfig::resolve() {
  if (!world_size) world_size = local_world_size.value_or(std::max(1, visible_devices()));
  if (!local_world_size) local_world_size = *world_size;
  if (*world_size < 1) refuse(fmt::format("world_size {} is out of range (valid: at least 1)", *world_size));
  if (*local_world_size < 1 || *local_world_size > *world_size || *local_world_size > launch::most_ranks)
    refuse(fmt::format("local_world_size {} is out of range for world_size {} (valid: 1 to {})", *local_world_size,
                       *world_size, std::min(*world_size, launch::most_ranks)));
  if (rank < -1 || rank >= *world_size || local_rank < -1 || local_rank >= *local_world_size)
    refuse(fmt::format("rank {} of {}, local_rank {} of {}: a rank is out of range", rank, *world_size, local_rank,
                       *local_world_size));
  launch::ranks_of_model(*world_size, model_parallelism, pipeline_parallelism);
  backend = backend_or(backend);
  for (std::string* const name : {&model_parallel_backend, &pipeline_parallel_backend, &data_parallel_backend})
    if (name->empty()) *name = backend;
  for (const std::string& name : {backend, model_parallel_backend, pipeline_parallel_backend, data_parallel_backend})
    collectives::check_backend_name(name);
  collectives::check_init_method(init_method);
  if (master_port && (*master_port < 1 || *master_port >= UINT16_MAX))
    refuse(fmt::format("master_port {} is out of range (valid: 1 to 65534)", *master_port));
  if (master_port || port_holder || rank >= 0) return;
  if (*local_world_size != *world_size)
    refuse(fmt::format("{} of {} ranks start on other hosts, so master_addr and master_port must be set",
                       *world_size - *local_world_size, *world_size));
  auto reserved = launch::reserve_port(launch::usual_port);
  if (!reserved) reserved = launch::reserve_port(0);
  if (!reserved) refuse("no free port was found for master_port");
  master_port = reserved->number;
  port_holder = std::make_shared<os::Fd>(std::move(reserved->holder));
}

std::string default_backend() {
  const bool has_devices = visible_devices() > 0 && collectives::has_device_backend();
  if (auto named = os::environment("TORCH_DISTRIBUTED_BACKEND")) {
    // Without a GPU, PyTorch's program may have requested it for another machine.
    if (*named == "nccl" && !has_devices) return "tcp";
    try {
      collectives::check_backend_name(*named);
      return std::move(*named);
    } catch (const Error& error) {
      // The variable belongs to PyTorch. A name that only PyTorch knows must not stop a job that has not requested it
      // here.
      log(LogLevel::info,
          fmt::format("TORCH_DISTRIBUTED_BACKEND is {}; \"tcp\" is used: {}", in_quotes(*named), error.what()));
    }
    return "tcp";
  }
  return has_devices ? "nccl" : "tcp";
}

std::string get_distributed_backend() {
  ChosenBackend& chosen = chosen_backend();
  const std::lock_guard lock(chosen.mutex);
  return chosen.name.empty() ? default_backend() : chosen.name;
}

void set_distributed_backend(std::string_view backend) {
  collectives::check_backend_name(backend);
  ChosenBackend& chosen = chosen_backend();
  const std::lock_guard lock(chosen.mutex);
  chosen.name = backend;
}

void init_process_group_from_backend(std::string_view backend) {
  dist::init_process_group(backend_or(backend));
}

void init_dist(const MultiprocessConfig& config) {
  if (config.rank < 0 || config.local_rank < 0 || !config.world_size || !config.local_world_size || !config.master_port)
    refuse("init_dist() needs rank, local_rank, and the values that resolve() sets");
  const auto set = [](const char* name, const auto& value) { ::setenv(name, fmt::format("{}", value).c_str(), 1); };
  set("RANK", config.rank);
  set("LOCAL_RANK", config.local_rank);
  set("WORLD_SIZE", *config.world_size);
  set("LOCAL_WORLD_SIZE", *config.local_world_size);
  set("MASTER_ADDR", config.master_addr);
  set("MASTER_PORT", *config.master_port);
  dist::InitOptions options{.init_method = config.init_method};
  if (config.init_method != "env://") {
    options.world_size = *config.world_size;
    options.rank = config.rank;
  }
  dist::init_process_group(backend_or(config.backend), options);
  dist::barrier();
}

void init_and_run(RankFunction function, const MultiprocessConfig& config, std::span<const std::string> arguments) {
  init_dist(config);
  // The parallel groups end before the process group, however the function ends.
  struct AtEnd {
    ~AtEnd() {
      destroy_parallel_groups();
      dist::destroy_process_group();
    }
  } const at_end;
  init_parallelism(config);
  function(arguments);
}

}  // namespace muster

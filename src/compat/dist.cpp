// SPDX-License-Identifier: Apache-2.0
#include "muster/compat/dist.hpp"

#include <fmt/core.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "muster/tcp.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/base/message.hpp"
#include "src/collectives/backend.hpp"
#include "src/compat/dist.hpp"
#include "src/rendezvous/world.hpp"

namespace muster::collectives {
namespace {

enum class InitMethod : std::uint8_t { shm, tcp, mpi };

InitMethod way_of(std::string_view name) {
  if (name == "shm") return InitMethod::shm;
  if (name == "tcp" || name == "gloo") return InitMethod::tcp;
  if (name == "mpi") return InitMethod::mpi;
  // Tensors on devices use NCCL, regardless of the backend name.
  if (name == "nccl" && has_device_backend()) return InitMethod::tcp;
  if (name == "nccl")
    throw Error(ErrorKind::unsupported,
                "backend \"nccl\" needs libmuster-cuda, which is not loaded. Link the program with it (pkg-config "
                "muster-cuda)");
  throw Error(ErrorKind::invalid_argument,
              fmt::format("unknown backend {} (expected shm, tcp, gloo, mpi or nccl)", in_quotes(name)));
}

/// Makes the group for env://.
std::shared_ptr<muster::Group> group_of_environment(const dist::InitOptions& options) {
  auto group = group::world_within(options.timeout);
  if (group->error()) {
    // The group failed in an earlier process group.
    group::forget_world();
    group = group::world_within(options.timeout);
  }
  if ((options.rank != -1 && options.rank != group->rank()) ||
      (options.world_size != -1 && options.world_size != group->size()))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("env://: the environment has rank {} and world_size {}, but the call has rank {} and "
                            "world_size {} (-1: not set)",
                            group->rank(), group->size(), options.rank, options.world_size));
  return group;
}

std::shared_ptr<muster::Group> group_at(InitMethod way, const dist::InitOptions& options) {
  const std::string& method = options.init_method;
  check_init_method(method);
  if (options.world_size < 1 || options.rank < 0)
    throw Error(ErrorKind::invalid_argument, fmt::format("init_method {}: rank is {}, and world_size is {}. Set both",
                                                         in_quotes(method), options.rank, options.world_size));
  if (options.rank >= options.world_size)
    throw Error(ErrorKind::invalid_argument, out_of_range_text(fmt::format("init_method {}: rank", in_quotes(method)),
                                                               options.rank, options.world_size));
  if (way == InitMethod::mpi)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("init_method {}: the backend \"mpi\" accepts only env://", in_quotes(method)));
  if (way == InitMethod::shm)
    return local_group({.key = method + ' ' + options.group_name,
                        .rank = options.rank,
                        .size = options.world_size,
                        .timeout = options.timeout});
  return tcp_group({.address = method,
                    .rank = options.rank,
                    .size = options.world_size,
                    .timeout = options.timeout,
                    .key = options.group_name});
}

}  // namespace

void check_init_method(const std::string& method) {
  if (method != "env://" && !method.starts_with("tcp://") && !method.starts_with("file://"))
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("init_method {}: malformed (expected env://, tcp://HOST:PORT or file:///PATH)", in_quotes(method)));
}

void check_backend_name(std::string_view name) {
  way_of(name);
}

void check_backend(std::string_view name, const muster::Group& group) {
  const InitMethod way = way_of(name);
  if (way == InitMethod::mpi && group.kind() != "mpi")
    throw Error(
        ErrorKind::unsupported,
        fmt::format("backend \"mpi\": the group is of kind {}. Start the ranks with mpiexec", in_quotes(group.kind())));
  if (way != InitMethod::shm) return;
  for (int rank = 0; rank < group.size(); ++rank)
    if (group.host_of(rank) != group.host_of(0))
      throw Error(ErrorKind::unsupported,
                  fmt::format("backend \"shm\": rank {} is on another host ({}). Use the backend tcp or mpi",
                              group.info(rank).global_rank, group.info(rank).host));
}

std::shared_ptr<muster::Group> init_group(std::string_view name, const dist::InitOptions& options) {
  const InitMethod way = way_of(name);
  auto group = options.init_method == "env://" ? group_of_environment(options) : group_at(way, options);
  check_backend(name, *group);
  if (options.init_method != "env://") return group;
  // The world keeps its own deadline. All ranks make the duplicate, whether they pass a timeout or not.
  group = group->duplicate({.timeout = options.timeout, .stop = {}, .phase = "process group"});
  if (options.timeout) group->set_timeout(*options.timeout);
  return group;
}

}  // namespace muster::collectives

namespace muster::dist {
namespace {

struct RankAndSize {
  int rank = 0;
  int size = 0;
};

/// The state of the module, as that of torch.distributed: at most one of the two modes at a time.
struct DistState {
  ForkMutex mutex;  // never held during the rendezvous
  bool is_starting = false;
  bool is_of_environment = false;  // its ranks are those of world()
  std::unique_ptr<ProcessGroup> group;
  std::optional<RankAndSize> master_worker;
};

/// Destroyed at exit like world(), so that the other ranks see that this rank has left.
DistState& the_world() {
  static DistState world;
  return world;
}

ProcessGroup& world_now() {
  DistState& world = the_world();
  const std::lock_guard lock(world.mutex);
  if (!world.group)
    throw Error(ErrorKind::invalid_argument,
                world.master_worker ? "this process is in master-worker mode, which has no collectives and no "
                                      "messages. Call destroy_process_group(), then init_process_group()"
                                    : "the process group is not initialized. Call init_process_group() first");
  return *world.group;
}

RankAndSize place_now() {
  DistState& world = the_world();
  const std::lock_guard lock(world.mutex);
  if (world.group) return {world.group->rank(), world.group->size()};
  if (world.master_worker) return *world.master_worker;
  throw Error(ErrorKind::invalid_argument,
              "the process group is not initialized. Call init_process_group() or init_master_worker() first");
}

/// Runs the rendezvous without the lock, so that is_initialized() and destroy_process_group() never wait for it.
/// `keep(world, group)` then runs under the lock and returns the result of the call.
template <class Keep>
auto start(std::string_view name, const InitOptions& options, const Keep& keep) {
  DistState& world = the_world();
  {
    const std::lock_guard lock(world.mutex);
    if (world.is_starting)
      throw Error(ErrorKind::invalid_argument,
                  "another thread is initializing the process group. Wait until it has finished");
    if (world.group || world.master_worker)
      throw Error(ErrorKind::invalid_argument,
                  "the process group is already initialized. Call destroy_process_group() first");
    world.is_starting = true;
    world.is_of_environment = options.init_method == "env://";
  }
  struct Started {
    DistState& world;
    ~Started() {
      if (const auto lock = world.mutex.lock_unless_abandoned()) world.is_starting = false;
    }
  } const started{world};
  return keep(world, *collectives::init_group(name, options));
}

int checked_rank(int rank) {
  const int size = place_now().size;
  if (rank < 0 || rank >= size) throw Error(ErrorKind::invalid_argument, out_of_range_text("world: rank", rank, size));
  return rank;
}

/// A collective call whose root is the rank `global` of the world. A root outside `group` is an error on every rank.
template <class Call>
void with_rank(const Group& group, int global, const Call& call) {
  ProcessGroup& ranks = process_group(group);
  const std::optional<int> rank = rank_in_group(ranks, global);
  try {
    call(ranks, rank.value_or(-1));
  } catch (const Error& error) {
    if (rank || error.kind() != ErrorKind::invalid_argument) throw;
    throw Error(ErrorKind::invalid_argument, fmt::format("rank {} is not in this group", global));
  }
}

}  // namespace

Tensor all_to_all(const Tensor& tensor, const Group& group) {
  return is_initialized() ? process_group(group).all_to_all(tensor.view()) : tensor;
}

void init_process_group(std::string_view name, const InitOptions& options) {
  start(name, options, [](DistState& world, muster::Group& group) {
    auto made = std::make_unique<ProcessGroup>(group);
    const std::lock_guard lock(world.mutex);
    world.group = std::move(made);
  });
}

MasterWorker init_master_worker(std::string_view name, const InitOptions& options) {
  return start(name, options, [](DistState& world, muster::Group& group) {
    MasterWorker made(group);
    const std::lock_guard lock(world.mutex);
    world.master_worker = {group.rank(), group.size()};
    return made;
  });
}

bool is_initialized() noexcept {
  DistState& world = the_world();
  const auto lock = world.mutex.lock_unless_abandoned();
  return lock && world.group != nullptr;
}

void destroy_process_group() noexcept {
  DistState& world = the_world();
  std::unique_ptr<ProcessGroup> ended;  // destroyed outside the lock, because its end may wait briefly for devices
  const auto lock = world.mutex.lock_unless_abandoned();
  if (!lock) return;  // in a forked child whose parent was changing it
  ended = std::move(world.group);
  // Ranks that begin anew after a failure need a new rendezvous.
  if (ended && world.is_of_environment && ended->group().error()) group::forget_world();
  world.master_worker.reset();
}

int get_rank() {
  return place_now().rank;
}

int get_world_size() {
  return place_now().size;
}

Group new_group(const RankList& ranks) {
  return Group(world_now().split(ranks));
}

ProcessGroup& process_group(const Group& group) {
  ProcessGroup& world = world_now();
  if (group.is_world()) return world;
  if (!group.members())
    throw Error(ErrorKind::invalid_argument, fmt::format("rank {} is not in this group", world.rank()));
  return *group.members();
}

std::optional<int> rank_in_group(const ProcessGroup& group, int global) {
  const ProcessGroup& world = world_now();
  if (global < 0 || global >= world.size()) return std::nullopt;
  return group.group_rank(world.global_rank(global));
}

Work<void> isend(const Tensor& tensor, int dst) {
  return world_now().isend(tensor, checked_rank(dst));
}

Work<int> irecv(const Tensor& tensor, int src) {
  return world_now().irecv(tensor, checked_rank(src));
}

void send(const Tensor& tensor, int dst) {
  world_now().send(tensor, checked_rank(dst));
}

int recv(const Tensor& tensor, std::optional<int> src) {
  return world_now().recv(tensor, src ? checked_rank(*src) : any_rank);
}

void broadcast(const Tensor& tensor, int src, const Group& group) {
  with_rank(group, src, [&](ProcessGroup& ranks, int rank) { ranks.broadcast(tensor, rank); });
}

void all_reduce(const Tensor& tensor, ReduceOp op, const Group& group) {
  process_group(group).all_reduce(tensor, op);
}

void reduce(const Tensor& tensor, int dst, ReduceOp op, const Group& group) {
  with_rank(group, dst, [&](ProcessGroup& ranks, int rank) { ranks.reduce(tensor, rank, op); });
}

void all_gather(std::span<const Tensor> tensors, const Tensor& tensor, const Group& group) {
  process_group(group).all_gather_into(tensors, tensor);
}

void gather(const Tensor& tensor, int dst, std::span<const Tensor> tensors, const Group& group) {
  with_rank(group, dst, [&](ProcessGroup& ranks, int rank) { ranks.gather_into(tensors, tensor, rank); });
}

void scatter(const Tensor& tensor, int src, std::span<const Tensor> tensors, const Group& group) {
  const std::vector<TensorView> parts(tensors.begin(), tensors.end());
  with_rank(group, src, [&](ProcessGroup& ranks, int rank) { ranks.scatter(tensor, parts, rank); });
}

void barrier(const Group& group) {
  process_group(group).barrier();
}

}  // namespace muster::dist

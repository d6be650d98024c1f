// SPDX-License-Identifier: Apache-2.0
#include "muster/dist.hpp"

#include <fmt/core.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "muster/tcp.hpp"
#include "src/collectives/backend.hpp"
#include "src/collectives/dist.hpp"

namespace muster::collectives {
namespace {

enum class Way : std::uint8_t { shm, tcp, mpi };

Way way_of(std::string_view name) {
  if (name == "shm") return Way::shm;
  if (name == "tcp" || name == "gloo") return Way::tcp;
  if (name == "mpi") return Way::mpi;
  // Whatever the backend, tensors on devices go by NCCL.
  if (name == "nccl" && has_device_backend()) return Way::tcp;
  if (name == "nccl")
    throw Error(ErrorKind::unsupported,
                "the backend 'nccl' moves tensors on devices, which this program does not know: link libmuster-cuda "
                "(pkg-config muster-cuda)");
  throw Error(ErrorKind::argument, fmt::format("there is no backend '{}': shm, tcp, gloo, mpi or nccl", name));
}

/// env://.
std::shared_ptr<SyncGroup> group_of_environment(const dist::InitOptions& options) {
  auto group = muster::world();
  if ((options.rank != -1 && options.rank != group->rank()) ||
      (options.world_size != -1 && options.world_size != group->size()))
    throw Error(ErrorKind::argument,
                fmt::format("env:// has this process as rank {} of {}, and the call as rank {} of {}", group->rank(),
                            group->size(), options.rank, options.world_size));
  return group;
}

std::shared_ptr<SyncGroup> group_at(Way way, const dist::InitOptions& options) {
  const std::string& method = options.init_method;
  check_init_method(method);
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    throw Error(ErrorKind::argument, fmt::format("{} needs a rank and a world_size, and cannot have rank {} of {}",
                                                 method, options.rank, options.world_size));
  if (way == Way::mpi)
    throw Error(ErrorKind::argument, fmt::format("the backend 'mpi' finds its ranks itself: env://, not {}", method));
  if (way == Way::shm)
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
    throw Error(ErrorKind::argument,
                fmt::format("'{}' is no init_method: env://, tcp://HOST:PORT or file:///PATH", method));
}

void check_backend_name(std::string_view name) {
  way_of(name);
}

void check_backend(std::string_view name, const SyncGroup& group) {
  const Way way = way_of(name);
  if (way == Way::mpi && group.kind() != "mpi")
    throw Error(ErrorKind::unsupported,
                fmt::format("the backend 'mpi' needs a job that MPI has started (mpiexec), and this one is of the kind "
                            "'{}'",
                            group.kind()));
  if (way != Way::shm) return;
  for (int rank = 0; rank < group.size(); ++rank)
    if (group.host_of(rank) != group.host_of(0))
      throw Error(ErrorKind::unsupported,
                  fmt::format("the backend 'shm' is for ranks of one host, and rank {} is on another one ({}): 'tcp' "
                              "or 'mpi'",
                              group.info(rank).rank, group.info(rank).host));
}

std::shared_ptr<SyncGroup> init_group(std::string_view name, const dist::InitOptions& options) {
  const Way way = way_of(name);
  auto group = options.init_method == "env://" ? group_of_environment(options) : group_at(way, options);
  if (options.timeout) group->set_timeout(*options.timeout);
  check_backend(name, *group);
  return group;
}

}  // namespace muster::collectives

namespace muster::dist {
namespace {

struct World {
  std::mutex mutex;
  std::unique_ptr<ProcessGroup> group;
};

/// Destroyed at exit, as world() is: a rank that ends in order is seen to have left.
World& the_world() {
  static World world;
  return world;
}

ProcessGroup& world_now() {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  if (!world.group) throw Error(ErrorKind::argument, "there is no process group: call init_process_group() first");
  return *world.group;
}

/// The rank of the world that the job calls so.
int rank_in(const ProcessGroup& world, int global) {
  const std::optional<int> rank = world.rank_of_global(global);
  if (!rank) throw Error(ErrorKind::argument, fmt::format("there is no rank {}", global));
  return *rank;
}

/// A collective call with a rank of the job: one that is not in the group is everyone's error.
template <class Call>
void with_rank(const Group& group, int global, const Call& call) {
  ProcessGroup& ranks = process_group(group);
  const std::optional<int> rank = ranks.rank_of_global(global);
  try {
    call(ranks, rank.value_or(-1));
  } catch (const Error& error) {
    if (rank || error.kind() != ErrorKind::argument) throw;
    throw Error(ErrorKind::argument, fmt::format("rank {} is not in this group", global));
  }
}

/// Of all ranks of the job. The caller has the lock.
std::shared_ptr<SyncGroup> find_group(const World& world, std::string_view name, const InitOptions& options) {
  if (world.group)
    throw Error(ErrorKind::argument,
                "init_process_group() has been called already: destroy_process_group() comes first");
  return collectives::init_group(name, options);
}

}  // namespace

Tensor all_to_all(const Tensor& tensor, const Group& group) {
  return is_initialized() ? process_group(group).all_to_all(tensor.view()) : tensor;
}

void init_process_group(std::string_view name, const InitOptions& options) {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  world.group = std::make_unique<ProcessGroup>(*find_group(world, name, options));
}

MasterWorker init_master_worker(std::string_view name, const InitOptions& options) {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  return MasterWorker(*find_group(world, name, options));
}

bool is_initialized() noexcept {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  return world.group != nullptr;
}

void destroy_process_group() noexcept {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  world.group.reset();
}

int get_rank() {
  return world_now().rank();
}

int get_world_size() {
  return world_now().size();
}

Group new_group(const RankList& ranks) {
  return Group(world_now().split(ranks));
}

ProcessGroup& process_group(const Group& group) {
  ProcessGroup& world = world_now();
  if (group.is_world()) return world;
  if (!group.members())
    throw Error(ErrorKind::argument, fmt::format("rank {} is not in this group", world.global_rank(world.rank())));
  return *group.members();
}

Work<void> isend(const Tensor& tensor, int dst) {
  ProcessGroup& world = world_now();
  return world.isend(tensor, rank_in(world, dst));
}

Work<int> irecv(const Tensor& tensor, int src) {
  ProcessGroup& world = world_now();
  return world.irecv(tensor, rank_in(world, src));
}

void send(const Tensor& tensor, int dst) {
  ProcessGroup& world = world_now();
  world.send(tensor, rank_in(world, dst));
}

int recv(const Tensor& tensor, std::optional<int> src) {
  ProcessGroup& world = world_now();
  return world.global_rank(world.recv(tensor, src ? rank_in(world, *src) : any_rank));
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

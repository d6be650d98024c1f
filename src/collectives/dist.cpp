// SPDX-License-Identifier: Apache-2.0
#include "muster/dist.hpp"

#include <fmt/core.h>

#include <mutex>
#include <vector>

#include "src/collectives/init_group.hpp"

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

// SPDX-License-Identifier: Apache-2.0
#pragma once
// muster::dist: one process group for the whole program, with the names and rules of torch.distributed. Semantics:
// torch.distributed of PyTorch 0.4, in which sources and destinations are ranks of the world. Everything runs on
// ProcessGroup, whose deadlines and checks apply.

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "muster/compat/master_worker.hpp"
#include "muster/process_group.hpp"

namespace muster::dist {

/// Options of init_process_group() and init_master_worker().
struct InitOptions {
  /// The rendezvous method:
  /// - "env://": the ranks meet as those of world().
  /// - "tcp://HOST:PORT": an address of the host of rank 0.
  /// - "file:///PATH": a file that does not exist yet, on a file system that all ranks see.
  std::string init_method = "env://";
  /// With env:// both may be omitted. If they are given, they must match the environment.
  int world_size = -1;
  /// The rank of this process; see `world_size`.
  int rank = -1;
  /// Distinguishes jobs that use the same rendezvous address.
  std::string group_name = {};
  /// The longest wait for the other ranks, and afterwards the default deadline of the group. Unset: as for world().
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Creates the process group of the program. Collective over the job. Backends:
/// - "shm": all ranks are on this host;
/// - "tcp" and its alias "gloo": any hosts, over TCP; ranks of the same host still use shared memory;
/// - "mpi": env:// only, for a job that MPI has started;
/// - "nccl": as "tcp", in a program with libmuster-cuda.
///
/// With every backend, tensors on GPUs use NCCL (muster/process_group.hpp). Throws Error(invalid_argument) on a second
/// call, an unknown backend or method, or invalid ranks. Throws Error(unsupported) if the backend cannot reach all
/// ranks, or if it is "nccl" and libmuster-cuda is missing. Throws also as world() and tcp_group().
void init_process_group(std::string_view backend, const InitOptions& options = {});

/// Collective over the job. Starts the master-worker mode in place of a process group. In this mode is_initialized()
/// returns false, get_rank() and get_world_size() work, and all other calls throw Error(invalid_argument). The mode
/// lasts until destroy_process_group(), also if the MasterWorker is destroyed earlier. Throws as init_process_group().
[[nodiscard]] MasterWorker init_master_worker(std::string_view backend, const InitOptions& options = {});

/// Returns true. It exists for compatibility with torch.distributed.
[[nodiscard]] constexpr bool is_available() noexcept {
  return true;
}
/// Returns whether this process has a process group. Local.
[[nodiscard]] bool is_initialized() noexcept;
/// Local. Ends the process group or the master-worker mode, so that either may be initialized again. Does nothing if
/// neither is initialized. Neither this call nor is_initialized() waits for a rendezvous that another thread runs.
void destroy_process_group() noexcept;
/// Return this process's rank in the world and the number of ranks. Throw Error(invalid_argument) before
/// init_process_group() or init_master_worker(). All calls below throw it before init_process_group().
[[nodiscard]] int get_rank();
/// Returns the number of ranks of the world. Throws as get_rank().
[[nodiscard]] int get_world_size();

/// A group of ranks of the world. An object exists also on ranks that are not in the group; calls with it throw
/// Error(invalid_argument) there.
class Group {
 public:
  /// Refers to all ranks.
  Group() = default;
  /// Refers to the members of a process group. Null: this rank is not in the group.
  explicit Group(std::shared_ptr<ProcessGroup> members) : is_world_(false), members_(std::move(members)) {}
  /// Returns whether this is the group of all ranks.
  [[nodiscard]] bool is_world() const noexcept { return is_world_; }
  /// Returns the process group of the members. Null for the group of all ranks, and on a rank that is not in the group.
  [[nodiscard]] const std::shared_ptr<ProcessGroup>& members() const noexcept { return members_; }

 private:
  bool is_world_ = true;
  std::shared_ptr<ProcessGroup> members_;
};
/// The group of all ranks.
inline const Group world_group{};

/// Creates a group of the ranks of a list. Collective over all ranks of the world, whether or not they are in the list;
/// all pass the same list.
[[nodiscard]] Group new_group(const RankList& ranks);
/// Returns the process group that the calls of `group` run on, for operations that muster::dist does not offer. Throws
/// Error(invalid_argument) on a rank that is not in the group. Local.
[[nodiscard]] ProcessGroup& process_group(const Group& group = world_group);

/// Returns the rank inside `group` of the process that has rank `global` in the world. Returns nullopt if that process
/// is not in the group.
[[nodiscard]] std::optional<int> rank_in_group(const ProcessGroup& group, int global);

// Every rank that these calls take or return (`src`, `dst`, the sender of a message) is a rank of the world, as
// get_rank() returns it, also for a call with a group. A root outside the group is Error(invalid_argument). Tensors
// must be contiguous, and results are written into them. ProcessGroup documents the other rules.

/// Starts to send a tensor to the rank `dst`.
[[nodiscard]] Work<void> isend(const Tensor& tensor, int dst);
/// Starts to receive a tensor from the rank `src`. The result is the rank of the sender.
[[nodiscard]] Work<int> irecv(const Tensor& tensor, int src);
/// Sends a tensor to the rank `dst`.
void send(const Tensor& tensor, int dst);
/// Receives a tensor from `src`, or from any rank if `src` is unset. Returns the rank of the sender.
int recv(const Tensor& tensor, std::optional<int> src = {});

/// Copies the elements of `src` into the tensor of every rank of the group. Collective, as all calls below.
void broadcast(const Tensor& tensor, int src, const Group& group = world_group);
/// Reduces the tensors of all ranks in place, with the same bits on all ranks.
void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, const Group& group = world_group);
/// Reduces the tensors of all ranks into the tensor of `dst`. The tensors of the other ranks are not changed.
void reduce(const Tensor& tensor, int dst, ReduceOp op = ReduceOp::sum, const Group& group = world_group);
/// Copies the tensor of each rank into `tensors`, which has one tensor per rank of the group, in rank order.
void all_gather(std::span<const Tensor> tensors, const Tensor& tensor, const Group& group = world_group);
/// Copies the tensor of each rank into `tensors` on `dst`, which has one tensor per rank; it is empty on the other
/// ranks.
void gather(const Tensor& tensor, int dst, std::span<const Tensor> tensors = {}, const Group& group = world_group);
/// Copies the part of each rank from `tensors` on `src` into `tensor`. `tensors` has one tensor per rank on `src` and
/// is empty on the other ranks.
void scatter(const Tensor& tensor, int src, std::span<const Tensor> tensors = {}, const Group& group = world_group);
/// Returns when all ranks of the group have entered the barrier.
void barrier(const Group& group = world_group);
/// Splits dimension 0 into equal slices and sends slice r to rank r of the group. Returns the received slices in rank
/// order, as a new tensor of the same shape. Before init_process_group() it returns `tensor` itself, as ml-starter
/// does.
[[nodiscard]] Tensor all_to_all(const Tensor& tensor, const Group& group = world_group);

}  // namespace muster::dist

// SPDX-License-Identifier: Apache-2.0
#pragma once
// muster::dist: one process group for the whole program, by the names and rules of torch.distributed. Semantics:
// torch.distributed of PyTorch 0.4, which takes ranks of the world as sources and destinations. Deadlines and checks
// are those of ProcessGroup, on which all of this runs.

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "muster/master_worker.hpp"
#include "muster/process_group.hpp"

namespace muster::dist {

struct InitOptions {
  /// - "env://": as world() finds this process's rank and the others.
  /// - "tcp://HOST:PORT": rank 0 is there.
  /// - "file:///PATH": a file that does not exist yet, on a file system that all ranks see.
  std::string init_method = "env://";
  /// With env:// they may be left out, and must be right if they are given.
  int world_size = -1;
  int rank = -1;
  /// Tells jobs apart that meet at the same place.
  std::string group_name = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Collective over the job. Backends:
/// - "shm": all ranks are on this host;
/// - "tcp", "gloo": any hosts, over TCP, which both names mean; ranks of one host share memory all the same;
/// - "mpi": env:// only, of a job that MPI has started;
/// - "nccl": as "tcp", in a program with libmuster-cuda.
/// Tensors on devices go by NCCL with each of them (muster/process_group.hpp). Throws Error(argument) on a second call,
/// a backend or method that is none, ranks that cannot be; Error(unsupported) if the backend cannot reach all ranks, or
/// is "nccl" and there is no libmuster-cuda; as world() and tcp_group().
void init_process_group(std::string_view backend, const InitOptions& options = {});

/// Collective over the job. Starts the master-worker mode in place of a process group. In this mode is_initialized()
/// returns false, get_rank() and get_world_size() work, and all other calls throw Error(argument). The mode lasts until
/// destroy_process_group(), also if the MasterWorker is destroyed earlier. Throws as init_process_group().
[[nodiscard]] MasterWorker init_master_worker(std::string_view backend, const InitOptions& options = {});

/// Always: this library has it.
[[nodiscard]] constexpr bool is_available() noexcept {
  return true;
}
[[nodiscard]] bool is_initialized() noexcept;
/// Local. Ends the process group or the master-worker mode, so that either may be initialized again. Does nothing if
/// neither is initialized. Neither this call nor is_initialized() waits for a rendezvous that another thread runs.
void destroy_process_group() noexcept;
/// Return this process's rank in the world and the number of ranks. Throw Error(argument) before init_process_group()
/// or init_master_worker(). All calls below throw it before init_process_group().
[[nodiscard]] int get_rank();
[[nodiscard]] int get_world_size();

/// A group, also on ranks that are not in it: calls with it are Error(argument) there.
class Group {
 public:
  /// All ranks.
  Group() = default;
  explicit Group(std::shared_ptr<ProcessGroup> members) : is_world_(false), members_(std::move(members)) {}
  [[nodiscard]] bool is_world() const noexcept { return is_world_; }
  /// Null for all ranks, and on a rank that is not in it.
  [[nodiscard]] const std::shared_ptr<ProcessGroup>& members() const noexcept { return members_; }

 private:
  bool is_world_ = true;
  std::shared_ptr<ProcessGroup> members_;
};
inline const Group world_group{};

/// Collective over all ranks, in it or not, with the same list.
[[nodiscard]] Group new_group(const RankList& ranks);
/// What a group's calls run on: for what is not here. Throws Error(argument) on a rank that is not in it.
[[nodiscard]] ProcessGroup& process_group(const Group& group = world_group);

/// Returns the rank inside `group` of the process that has rank `global` in the world. Returns nullopt if that process
/// is not in the group.
[[nodiscard]] std::optional<int> rank_in_group(const ProcessGroup& group, int global);

// Every rank that these calls take or return (`src`, `dst`, the sender of a message) is a rank of the world, as
// get_rank() returns it, also for a call with a group. A root outside the group is Error(argument). Tensors must be
// contiguous, and results are written into them. ProcessGroup documents the other rules.

[[nodiscard]] Work<void> isend(const Tensor& tensor, int dst);
[[nodiscard]] Work<int> irecv(const Tensor& tensor, int src);
void send(const Tensor& tensor, int dst);
/// From any rank, if none is given. Returns the sender.
int recv(const Tensor& tensor, std::optional<int> src = {});

void broadcast(const Tensor& tensor, int src, const Group& group = world_group);
/// In place; the same bits on all ranks.
void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, const Group& group = world_group);
/// The result is dst's; the other ranks' tensors stay as they are.
void reduce(const Tensor& tensor, int dst, ReduceOp op = ReduceOp::sum, const Group& group = world_group);
/// `tensors`: one for each rank of the group, in their order.
void all_gather(std::span<const Tensor> tensors, const Tensor& tensor, const Group& group = world_group);
/// On dst, `tensors` has one for each rank; on the others it is empty.
void gather(const Tensor& tensor, int dst, std::span<const Tensor> tensors = {}, const Group& group = world_group);
/// On src, `tensors` has one for each rank; on the others it is empty.
void scatter(const Tensor& tensor, int src, std::span<const Tensor> tensors = {}, const Group& group = world_group);
void barrier(const Group& group = world_group);
/// Dimension 0 cut into equal slices, of which each rank gets one of each rank, in the order of the ranks: a new tensor
/// of the same shape. Before init_process_group() it is the tensor itself, as ml-starter's is.
[[nodiscard]] Tensor all_to_all(const Tensor& tensor, const Group& group = world_group);

}  // namespace muster::dist

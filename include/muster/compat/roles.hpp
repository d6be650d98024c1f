// SPDX-License-Identifier: Apache-2.0
#pragma once
// muster::roles: divides the ranks of a job into training ranks, managers of a replay buffer and a coordinator. It
// offers one group per role, messages of bytes, and averages over the training ranks. Semantics: gfn.utils.distributed
// of torchgfn and its RankLayout; docs/explanation/comparison.md lists the differences.

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/compat/dist.hpp"
#include "muster/process_group.hpp"

namespace muster::roles {

/// The role of a rank.
enum class Role : std::uint8_t { training, buffer, coordinator };

/// The number of ranks per role; the same on all ranks.
struct RoleSizes {
  /// Number of ranks that manage a replay buffer.
  int num_remote_buffers = 0;
  /// Number of groups of equal size that the training ranks are divided into.
  int num_agent_groups = 1;
  /// Makes the last rank a coordinator, which neither trains nor manages a buffer.
  bool use_coordinator = false;
};

/// The role of each rank of the world. It depends only on the sizes and on the host of each rank, so all ranks compute
/// the same layout. Local.
struct RankLayout {
  /// Number of ranks of the world.
  int world_size = 0;
  /// Ordered by agent group.
  std::vector<int> training_ranks = {};
  /// The managers of the replay buffers.
  std::vector<int> buffer_ranks = {};
  /// The coordinator, if there is one.
  std::optional<int> coordinator_rank = {};
  /// Equal slices of training_ranks.
  std::vector<std::vector<int>> agent_groups = {};
  /// For each of buffer_ranks: the training ranks that it serves.
  std::vector<std::vector<int>> clients_of = {};
  /// True if the number of buffers is not a multiple of the number of hosts. The layout then ignores hosts, so a
  /// manager may be on another host than the ranks that it serves.
  bool host_agnostic = false;

  /// Computes a layout without hosts. The training ranks are divided as evenly as possible, larger shares first. Each
  /// share is followed by its manager. Throws Error(invalid_argument) if no training rank is left, if there are fewer
  /// training ranks than buffers, or if they cannot be divided into groups of equal size.
  static RankLayout contiguous(int world_size, const RoleSizes& sizes);
  /// Computes a layout from hosts. `hosts` has one number per rank, equal for ranks of the same host. If the number of
  /// buffers is a multiple of the number of hosts, each host gets the same number of managers. The ranks of a host are
  /// divided as evenly as possible, larger shares first, and the last rank of each share is its manager. Otherwise the
  /// layout is that of contiguous(). The coordinator is excluded from the division. Throws as contiguous(), and
  /// Error(invalid_argument) if a host has fewer than two ranks per manager.
  static RankLayout by_hosts(std::span<const int> hosts, const RoleSizes& sizes);

  /// Returns the role of `rank`. This function and the next three throw Error(invalid_argument) if the rank does not
  /// exist.
  [[nodiscard]] Role role(int rank) const;
  /// Returns the manager of a training rank; nullopt without buffers and for other ranks.
  [[nodiscard]] std::optional<int> assigned_buffer(int rank) const;
  /// Returns the training ranks that a manager serves; empty for other ranks.
  [[nodiscard]] std::vector<int> assigned_training_ranks(int rank) const;
  /// Returns the agent group of a training rank; for a manager, that of the first rank that it serves; for the
  /// coordinator, 0.
  [[nodiscard]] int agent_group_id(int rank) const;
  /// Returns the number of training ranks per agent group; 0 without groups.
  [[nodiscard]] int agent_group_size() const noexcept {
    return agent_groups.empty() ? 0 : static_cast<int>(agent_groups.front().size());
  }
};

/// A message that is being sent. The message keeps its bytes and is sent even if the handle is destroyed. A message
/// that is not sent when the context ends is lost.
class AsyncSendHandle {
 public:
  AsyncSendHandle() = default;
  /// Creates a handle of a running operation.
  explicit AsyncSendHandle(Work<void> work) : work_(std::move(work)) {}
  /// Returns whether the message has been sent. Returns false after wait() has thrown because it could not be sent.
  /// Does not wait.
  [[nodiscard]] bool is_complete() const { return !failure_ && (!work_.is_pending() || work_.is_done()); }
  /// Waits until the message has been sent. Throws as ProcessGroup::send(); a later call throws the same error again.
  void wait();

 private:
  Work<void> work_;
  std::optional<Error> failure_;
};

/// A received message.
struct ReceivedBytes {
  /// The rank of the sender.
  int source = 0;
  /// The tag of the message.
  int tag = 0;
  Tensor data = {};  ///< u8, one dimension, in memory of this rank
};

/// The ranks of a job and their groups, from the perspective of one rank. The parameter `group` is one of the groups of
/// this rank; null means all ranks. The rules of ProcessGroup for errors, deadlines, threads and tensors on GPUs apply.
class DistributedContext {
 public:
  DistributedContext(DistributedContext&&) noexcept = default;
  DistributedContext& operator=(DistributedContext&&) noexcept = default;

  /// Returns the role of each rank.
  [[nodiscard]] const RankLayout& layout() const noexcept { return layout_; }
  /// Returns the rank of this process in the world.
  [[nodiscard]] int my_rank() const noexcept { return my_rank_; }
  /// Returns the number of ranks of the world.
  [[nodiscard]] int world_size() const noexcept { return layout_.world_size; }
  /// Returns the number of training ranks.
  [[nodiscard]] int num_training_ranks() const noexcept { return static_cast<int>(layout_.training_ranks.size()); }
  /// Returns the agent group of this rank, as RankLayout::agent_group_id().
  [[nodiscard]] int agent_group_id() const { return layout_.agent_group_id(my_rank_); }
  /// Returns the number of training ranks per agent group.
  [[nodiscard]] int agent_group_size() const noexcept { return layout_.agent_group_size(); }
  /// Returns the rank of the coordinator; nullopt if there is none.
  [[nodiscard]] std::optional<int> coordinator_rank() const noexcept { return layout_.coordinator_rank; }
  /// Returns the manager of this rank, as RankLayout::assigned_buffer().
  [[nodiscard]] std::optional<int> assigned_buffer() const { return layout_.assigned_buffer(my_rank_); }
  /// Returns the training ranks that this manager serves, as RankLayout::assigned_training_ranks().
  [[nodiscard]] std::vector<int> assigned_training_ranks() const { return layout_.assigned_training_ranks(my_rank_); }
  /// Returns whether this rank trains.
  [[nodiscard]] bool is_training_rank() const { return layout_.role(my_rank_) == Role::training; }
  /// Returns whether this rank manages a replay buffer.
  [[nodiscard]] bool is_buffer_rank() const { return layout_.role(my_rank_) == Role::buffer; }
  /// Returns whether this rank is the coordinator.
  [[nodiscard]] bool is_coordinator_rank() const { return layout_.role(my_rank_) == Role::coordinator; }

  // The groups are valid as long as this object, or until cleanup(). These functions throw Error(invalid_argument)
  // after that, and on a rank that is not in the group.

  /// Returns the group of all ranks, with the same numbers.
  [[nodiscard]] ProcessGroup& world() const;
  /// Returns the group of the training ranks, in the order of the layout.
  [[nodiscard]] ProcessGroup& train_group() const;
  /// Returns the group of the managers, in the order of the layout.
  [[nodiscard]] ProcessGroup& buffer_group() const;
  /// Returns the agent group of this training rank. If only one agent group exists, it is train_group().
  [[nodiscard]] ProcessGroup& agent_group() const;

  /// Destroys the groups of this rank. It waits no longer than ~ProcessGroup() and may be called repeatedly. Local. The
  /// other ranks observe that this rank has left, which fails waits for it and for any rank. In a program whose ranks
  /// end at different times, call barrier() first.
  void cleanup() noexcept;

  // Messages of bytes between ranks of the world, by tag (0 or more). The receiver learns the length. Tensors of any
  // dtype and shape may be sent; the receiver gets the bytes of a contiguous copy. These calls and the messages of
  // world() share one message stream.

  /// Sends a tensor to `dst_rank`. Throws as ProcessGroup::send().
  void send(const TensorView& data, int dst_rank, int tag = 0, const CollectiveOptions& options = {});
  /// Starts to send a tensor, without waiting. `data` must not be modified, and borrowed memory must stay valid, until
  /// the send is complete.
  [[nodiscard]] AsyncSendHandle isend(const Tensor& data, int dst_rank, int tag = 0,
                                      const CollectiveOptions& options = {});
  /// Receives the oldest message from `src_rank`, or from any rank if it is unset. `tag` may be any_tag. Throws
  /// Error(rank_mismatch) if the message is a Config that is not a tensor, and as ProcessGroup::recv().
  [[nodiscard]] ReceivedBytes recv(std::optional<int> src_rank = {}, int tag = 0,
                                   const CollectiveOptions& options = {});

  // Collectives over the group.

  /// Copies the tensor of each rank into `output_list`, which has one contiguous writable tensor per rank of the group.
  void all_gather(std::span<const Tensor> output_list, const TensorView& tensor, ProcessGroup* group = nullptr,
                  const CollectiveOptions& options = {}) {
    ranks_of(group).all_gather_into(output_list, tensor, options);
  }
  /// Reduces the tensors of all ranks in place.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, ProcessGroup* group = nullptr,
                  const CollectiveOptions& options = {}) {
    ranks_of(group).all_reduce(tensor, op, options);
  }
  /// Copies the elements of `src`, a rank of the group, into the tensor of every rank.
  void broadcast(const Tensor& tensor, int src, ProcessGroup* group = nullptr, const CollectiveOptions& options = {}) {
    ranks_of(group).broadcast(tensor, src, options);
  }
  /// Returns when all ranks of the group have entered the barrier.
  void barrier(ProcessGroup* group = nullptr, const CollectiveOptions& options = {}) {
    ranks_of(group).barrier(options);
  }
  // Local.
  /// Returns the number of this rank in the group. Local.
  [[nodiscard]] int get_rank(const ProcessGroup* group = nullptr) const {
    return group == nullptr ? my_rank_ : group->rank();
  }
  /// Returns the number of ranks of the group. Local.
  [[nodiscard]] int get_world_size(const ProcessGroup* group = nullptr) const {
    return group == nullptr ? world_size() : group->size();
  }

 private:
  friend DistributedContext initialize_distributed_compute(Group& group, const RoleSizes& sizes,
                                                           const CollectiveOptions& options);
  DistributedContext(Group& group, RankLayout layout, const CollectiveOptions& options);
  [[nodiscard]] ProcessGroup& ranks_of(ProcessGroup* group) const { return group == nullptr ? world() : *group; }
  [[nodiscard]] ProcessGroup& peers(Role role) const;

  RankLayout layout_;
  int my_rank_ = 0;
  std::unique_ptr<ProcessGroup> world_;
  std::unique_ptr<ProcessGroup> peers_;   // group of the role of this rank; null on the coordinator
  std::unique_ptr<ProcessGroup> agents_;  // null if it is the train group
};

/// The backend that reaches ranks on any hosts. Ranks of the same host still use shared memory.
inline constexpr std::string_view default_backend = "tcp";

/// Divides the ranks of `group`, which become the world, into roles. Collective over `group`. Group::host_of()
/// determines the hosts. Throws on all ranks Error(invalid_argument) if the sizes are invalid, and Error(rank_mismatch)
/// if they differ between ranks. No group has been created in these cases, and `group` remains usable. Throws also as
/// Group::split(). Rank 0 logs a warning if the layout ignores the hosts.
[[nodiscard]] DistributedContext initialize_distributed_compute(Group& group, const RoleSizes& sizes,
                                                                const CollectiveOptions& options = {});
/// Forms the world as dist::init_process_group() does, with the same backends, and divides it into roles. Collective
/// over the job. It does not create a process group for muster::dist. Throws as the call above and
/// dist::init_process_group().
[[nodiscard]] DistributedContext initialize_distributed_compute(std::string_view backend, const RoleSizes& sizes,
                                                                const dist::InitOptions& options = {});

/// Returns the rows (dimension 0) of all ranks in rank order, on rank 0 of the group; nullopt on the other ranks.
/// Collective over `group`. Any dtype is allowed. The number of rows may differ between ranks and may be 0; the other
/// extents are equal. Throws Error(invalid_argument) if `local` is a scalar, and as ProcessGroup::gatherv().
[[nodiscard]] std::optional<Tensor> gather_distributed_data(const TensorView& local, ProcessGroup& group,
                                                            const CollectiveOptions& options = {});

/// One tensor of a model. Tensors to be averaged have a float dtype and are contiguous and writable.
struct Parameter {
  /// The name of the parameter, for error messages.
  std::string name;
  /// The values.
  Tensor value = {};
  /// Unset if the parameter is frozen or did not contribute to the loss.
  std::optional<Tensor> gradient = {};
};

// Averages over the ranks of a group, written in place, with the same bits on all ranks. Collective over `group`, which
// is the train group or an agent group. Narrow floats are added in f32 and rounded once. Small tensors of the same
// dtype are combined into calls of up to 4 MiB. All ranks pass the same parameters in the same order. A difference
// throws Error(rank_mismatch) on all ranks, which names the parameter. A tensor that cannot be averaged throws
// Error(invalid_argument | unsupported) on all ranks. Nothing has been written in these cases, and the group remains
// usable.

/// Averages the gradients. The same parameters have a gradient on all ranks.
void average_gradients(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options = {});
/// Averages the values.
void average_models(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options = {});

/// Returns the value of the first of these environment variables that is set and not empty, else `default_value`.
/// Local.
[[nodiscard]] std::optional<std::string> first_env(std::initializer_list<const char*> names,
                                                   std::optional<std::string> default_value = {});

}  // namespace muster::roles

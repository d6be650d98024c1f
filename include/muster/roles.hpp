// SPDX-License-Identifier: Apache-2.0
#pragma once
// muster::roles: the ranks of a job as training ranks, managers of a replay buffer, and a coordinator; a group for
// each, messages of bytes, averages over the training ranks. Semantics: gfn.utils.distributed of torchgfn and its
// RankLayout, with what is wrong there put right (docs/roles.md).

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/dist.hpp"
#include "muster/process_group.hpp"

namespace muster::roles {

enum class Role : std::uint8_t { training, buffer, coordinator };

struct RoleSizes {
  /// How many ranks manage a replay buffer.
  int num_remote_buffers = 0;
  /// How many groups the training ranks are cut into, all of one size.
  int num_agent_groups = 1;
  /// Whether the last rank is a coordinator, which neither trains nor manages.
  bool use_coordinator = false;
};

/// Which rank has which role, in ranks of the world. Made of the sizes and of the host of each rank alone, so that all
/// ranks make the same. Local.
struct RankLayout {
  int world_size = 0;
  /// In the order of the agent groups.
  std::vector<int> training_ranks = {};
  std::vector<int> buffer_ranks = {};
  std::optional<int> coordinator_rank = {};
  /// Equal slices of training_ranks.
  std::vector<std::vector<int>> agent_groups = {};
  /// For each of buffer_ranks: the training ranks that it serves.
  std::vector<std::vector<int>> served = {};
  /// The buffers are no multiple of the hosts, so that hosts were not looked at: a manager may be on another one than
  /// the ranks it serves.
  bool ignores_hosts = false;

  /// The training ranks are shared out as evenly as can be, larger shares first; behind each share comes its manager.
  /// Throws Error(argument) if no training rank is left, if there are fewer of them than buffers, or if they cannot be
  /// cut into groups of one size.
  static RankLayout by_arithmetic(int world_size, const RoleSizes& sizes);
  /// `hosts`: a number for each rank, equal for ranks of one host. If the buffers are a multiple of the hosts, each
  /// host gets as many managers: the ranks of a host are shared out as evenly as can be, larger shares first, and the
  /// last of each share is its manager. Else as by_arithmetic(). Throws as that, and Error(argument) if a host has
  /// fewer than two ranks for each of its managers. The coordinator is none of them.
  static RankLayout by_hosts(std::span<const int> hosts, const RoleSizes& sizes);

  /// These throw Error(argument) if there is no such rank.
  [[nodiscard]] Role role(int rank) const;
  /// Of a training rank: its manager. None if there are no buffers, and of other ranks.
  [[nodiscard]] std::optional<int> assigned_buffer(int rank) const;
  /// Of a manager: the training ranks that it serves. Empty of other ranks.
  [[nodiscard]] std::vector<int> assigned_training_ranks(int rank) const;
  /// Of a manager: that of the first rank that it serves. Of the coordinator: 0.
  [[nodiscard]] int agent_group_id(int rank) const;
  [[nodiscard]] int agent_group_size() const noexcept {
    return agent_groups.empty() ? 0 : static_cast<int>(agent_groups.front().size());
  }
};

/// A message on its way. It keeps its bytes and goes on, whether or not this handle lives; what has not gone when the
/// context ends is lost.
class AsyncSendHandle {
 public:
  AsyncSendHandle() = default;
  explicit AsyncSendHandle(Work<void> work) : work_(std::move(work)) {}
  /// Whether the message has been sent. False after wait() has thrown that it cannot be. Never waits.
  [[nodiscard]] bool is_complete() const { return !failure_ && (!work_.is_pending() || work_.is_done()); }
  /// Returns at once if it is complete. Throws as ProcessGroup::send; a later call throws the same failure again.
  void wait();

 private:
  Work<void> work_;
  std::optional<Error> failure_;
};

struct ReceivedBytes {
  int source = 0;
  int tag = 0;
  Tensor data = {};  ///< u8, one dimension, of this rank's own memory
};

/// The ranks of a job and their groups, as one rank has them. `group` in calls is one of its own groups; null: all
/// ranks. Errors, deadlines, threads, tensors on devices: as ProcessGroup.
class DistributedContext {
 public:
  DistributedContext(DistributedContext&&) noexcept = default;
  DistributedContext& operator=(DistributedContext&&) noexcept = default;

  [[nodiscard]] const RankLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] int my_rank() const noexcept { return my_rank_; }
  [[nodiscard]] int world_size() const noexcept { return layout_.world_size; }
  [[nodiscard]] int num_training_ranks() const noexcept { return static_cast<int>(layout_.training_ranks.size()); }
  [[nodiscard]] int agent_group_id() const { return layout_.agent_group_id(my_rank_); }
  [[nodiscard]] int agent_group_size() const noexcept { return layout_.agent_group_size(); }
  [[nodiscard]] std::optional<int> coordinator_rank() const noexcept { return layout_.coordinator_rank; }
  [[nodiscard]] std::optional<int> assigned_buffer() const { return layout_.assigned_buffer(my_rank_); }
  [[nodiscard]] std::vector<int> assigned_training_ranks() const { return layout_.assigned_training_ranks(my_rank_); }
  [[nodiscard]] bool is_training_rank() const { return layout_.role(my_rank_) == Role::training; }
  [[nodiscard]] bool is_buffer_rank() const { return layout_.role(my_rank_) == Role::buffer; }
  [[nodiscard]] bool is_coordinator_rank() const { return layout_.role(my_rank_) == Role::coordinator; }

  // The groups live as long as this, or until cleanup(). These throw Error(argument) after that, and on a rank that is
  // not in the group.

  /// All ranks, with the same numbers.
  [[nodiscard]] ProcessGroup& world() const;
  /// The training ranks, in the layout's order.
  [[nodiscard]] ProcessGroup& train_group() const;
  /// The managers, in the layout's order.
  [[nodiscard]] ProcessGroup& buffer_group() const;
  /// This training rank's agent group. If there is one alone, it is the train group itself.
  [[nodiscard]] ProcessGroup& agent_group() const;

  /// Local, any number of times. Ends the groups of this rank, and waits for no more than ~ProcessGroup does. The
  /// others see that it has left, which ends waits for it and for any rank: a program whose ranks end at different
  /// times calls barrier() first.
  void cleanup() noexcept;

  // Messages of bytes, between ranks of the world, by tag (0 or more). The receiver learns the length. Tensors of any
  // dtype and shape are sent: what is received is the bytes that a contiguous copy has. They go by the messages of
  // world(), and are messages of its own calls, too.

  void send(const TensorView& data, int dst_rank, int tag = 0, const CollectiveOptions& options = {});
  /// Never waits. `data` must not be written to until it is complete; a borrowed tensor's memory stays as long.
  [[nodiscard]] AsyncSendHandle isend(const Tensor& data, int dst_rank, int tag = 0,
                                      const CollectiveOptions& options = {});
  /// The oldest message of that tag (any_tag: of any) from that rank, or from any one if none is given. Throws
  /// Error(rank_mismatch) if it is a Config that is no tensor.
  [[nodiscard]] ReceivedBytes recv(std::optional<int> src_rank = {}, int tag = 0,
                                   const CollectiveOptions& options = {});

  // Collective over the group.

  /// Into tensors of their own, one for each rank of the group, contiguous and writable.
  void all_gather(std::span<const Tensor> output_list, const TensorView& tensor, ProcessGroup* group = nullptr,
                  const CollectiveOptions& options = {}) {
    ranks_of(group).all_gather_into(output_list, tensor, options);
  }
  /// In place.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, ProcessGroup* group = nullptr,
                  const CollectiveOptions& options = {}) {
    ranks_of(group).all_reduce(tensor, op, options);
  }
  /// `src`: a rank of the group.
  void broadcast(const Tensor& tensor, int src, ProcessGroup* group = nullptr, const CollectiveOptions& options = {}) {
    ranks_of(group).broadcast(tensor, src, options);
  }
  void barrier(ProcessGroup* group = nullptr, const CollectiveOptions& options = {}) {
    ranks_of(group).barrier(options);
  }
  // Local.
  [[nodiscard]] int get_rank(const ProcessGroup* group = nullptr) const {
    return group == nullptr ? my_rank_ : group->rank();
  }
  [[nodiscard]] int get_world_size(const ProcessGroup* group = nullptr) const {
    return group == nullptr ? world_size() : group->size();
  }

 private:
  friend DistributedContext initialize_distributed_compute(SyncGroup& group, const RoleSizes& sizes,
                                                           const CollectiveOptions& options);
  DistributedContext(SyncGroup& group, RankLayout layout, const CollectiveOptions& options);
  [[nodiscard]] ProcessGroup& ranks_of(ProcessGroup* group) const { return group == nullptr ? world() : *group; }
  [[nodiscard]] ProcessGroup& peers(Role role) const;

  RankLayout layout_;
  int my_rank_ = 0;
  std::unique_ptr<ProcessGroup> world_;
  std::unique_ptr<ProcessGroup> peers_;   // of this rank's role; none: the coordinator
  std::unique_ptr<ProcessGroup> agents_;  // none where it is the train group
};

/// Moves tensors wherever ranks are. Ranks of one host share memory all the same.
inline constexpr std::string_view default_backend = "tcp";

/// Collective over `group`, whose ranks are the world's, on the hosts that SyncGroup::host_of() says. Sizes that cannot
/// be are Error(argument) on all ranks, sizes that differ Error(rank_mismatch); both before a group is made, and
/// `group` goes on. Else throws as SyncGroup::split. Rank 0 logs a warning if the layout ignores the hosts.
[[nodiscard]] DistributedContext initialize_distributed_compute(SyncGroup& group, const RoleSizes& sizes,
                                                                const CollectiveOptions& options = {});
/// Collective over the job, whose ranks meet as those of dist::init_process_group() do, by the same backends. It makes
/// no process group for muster::dist. Throws as both.
[[nodiscard]] DistributedContext initialize_distributed_compute(std::string_view backend, const RoleSizes& sizes,
                                                                const dist::InitOptions& options = {});

/// Collective over `group`. All rows (dimension 0) in the order of the ranks, on rank 0 of the group; none on the
/// others. Any dtype; the numbers of rows may differ, and may be 0, the rest of the shape may not. Throws
/// Error(argument) of a scalar; as ProcessGroup::gatherv.
[[nodiscard]] std::optional<Tensor> gather_distributed_data(const TensorView& local, ProcessGroup& group,
                                                            const CollectiveOptions& options = {});

/// One of a model's tensors. What is averaged is of a float dtype, contiguous and writable.
struct Parameter {
  std::string name;
  Tensor value = {};
  /// None: it is frozen, or had no part in the loss.
  std::optional<Tensor> gradient = {};
};

// Collective over `group`: the training ranks, or those of an agent group. The average over its ranks is written in
// place, with the same bits on all of them; narrow floats are added up in f32 and rounded once. Small tensors of a
// dtype go in one call, up to 4 MiB. All ranks give the same parameters in the same order: a difference is
// Error(rank_mismatch) on all of them that names the parameter. A tensor that cannot be averaged is Error(argument |
// unsupported) on all likewise. Nothing has been written then, and the group goes on.

/// Of the parameters that have a gradient: the same ones on all ranks.
void average_gradients(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options = {});
/// Of the values.
void average_models(std::span<const Parameter> model, ProcessGroup& group, const CollectiveOptions& options = {});

/// Local. The first of these environment variables that is set and not empty.
[[nodiscard]] std::optional<std::string> first_env(std::initializer_list<const char*> names,
                                                   std::optional<std::string> default_value = {});

}  // namespace muster::roles

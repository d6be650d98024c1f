// SPDX-License-Identifier: Apache-2.0
#pragma once
// GroupCoordinator: one of the groups that a model's ranks are split into (tensor parallel, pipeline parallel, ...),
// with the calls and the defaults of vLLM's class of that name, over a ProcessGroup. Where that class leaves a call
// open or has it wrong this one is right: negative ranks are errors, any dimension can be scattered, a group of one
// does what a larger group does, in memory of its own, and objects are Configs (no pickle).

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/message_queue.hpp"
#include "muster/process_group.hpp"

namespace muster {

struct GroupCoordinatorOptions {
  /// broadcast_object() from rank 0 goes through a MessageQueue, whose writer does not wait for the others. The ranks
  /// of each group share memory then, else its constructor throws Error(unsupported) on all of them.
  bool use_message_queue_broadcaster = false;
  CollectiveOptions waits = {};
};

/// Ranks that a call takes (`src`, `dst`) are ranks in the group; rank(), ranks() and the neighbours are those of the
/// group that it was made of. Results are fresh tensors. Errors: as ProcessGroup.
class GroupCoordinator {
 public:
  /// Collective over `world`: all of its ranks give the same lists, each of them in exactly one. `name` is told in
  /// unique_name() with a number of its own. Throws Error(argument) if a rank is in no list or lists have a rank twice,
  /// Error(rank_mismatch) if ranks give different lists.
  GroupCoordinator(std::span<const std::vector<int>> group_ranks, SyncGroup& world, std::string_view name = "group",
                   const GroupCoordinatorOptions& options = {});

  /// In `world`.
  [[nodiscard]] int rank() const noexcept { return ranks_[static_cast<std::size_t>(rank_in_group())]; }
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
  [[nodiscard]] int rank_in_group() const noexcept { return group_->rank(); }
  [[nodiscard]] int world_size() const noexcept { return group_->size(); }
  [[nodiscard]] int first_rank() const noexcept { return ranks_.front(); }
  [[nodiscard]] int last_rank() const noexcept { return ranks_.back(); }
  [[nodiscard]] bool is_first_rank() const noexcept { return rank_in_group() == 0; }
  [[nodiscard]] bool is_last_rank() const noexcept { return rank_in_group() == world_size() - 1; }
  /// The neighbours, around the end.
  [[nodiscard]] int next_rank() const noexcept { return ranks_[static_cast<std::size_t>(next())]; }
  [[nodiscard]] int prev_rank() const noexcept { return ranks_[static_cast<std::size_t>(prev())]; }
  /// "NAME:0", "NAME:1", ...: the groups of this process by that name.
  [[nodiscard]] const std::string& unique_name() const noexcept { return unique_name_; }
  [[nodiscard]] ProcessGroup& process_group() const noexcept { return *group_; }

  void barrier(const CollectiveOptions& options = {}) { group_->barrier(options); }
  /// The sum.
  [[nodiscard]] Tensor all_reduce(const TensorView& tensor, const CollectiveOptions& options = {});
  [[nodiscard]] Tensor all_gather(const TensorView& tensor, int dim = -1, const CollectiveOptions& options = {});
  /// Extents along `dim` may differ. `sizes`, if given: all ranks' extents, which are checked.
  [[nodiscard]] Tensor all_gatherv(const TensorView& tensor, int dim = 0, std::span<const std::int64_t> sizes = {},
                                   const CollectiveOptions& options = {});
  [[nodiscard]] std::vector<Tensor> all_gatherv(std::span<const TensorView> tensors, int dim = 0,
                                                std::span<const std::int64_t> sizes = {},
                                                const CollectiveOptions& options = {});
  /// The sum; this rank's slice of `dim`.
  [[nodiscard]] Tensor reduce_scatter(const TensorView& tensor, int dim = -1, const CollectiveOptions& options = {});
  [[nodiscard]] Tensor reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim = -1,
                                       const CollectiveOptions& options = {});
  /// On `dst`.
  [[nodiscard]] std::optional<Tensor> gather(const TensorView& tensor, int dst = 0, int dim = -1,
                                             const CollectiveOptions& options = {});
  /// In place.
  void broadcast(const Tensor& tensor, int src = 0, const CollectiveOptions& options = {});

  /// Large tensors that came through the queue are read-only (MessageQueue::get_config).
  [[nodiscard]] Config broadcast_object(const Config& object, int src = 0, const CollectiveOptions& options = {});
  /// A dictionary with tensors among its values, in src's order of the keys.
  [[nodiscard]] ConfigObject broadcast_tensor_dict(const ConfigObject& dict, int src = 0,
                                                   const CollectiveOptions& options = {});

  // Queues between the ranks of this group, which have to share memory, else Error(unsupported) on all of them.
  // Collective; every queue is ready on all ranks when the call returns.

  /// `outside_writer` of the rank `writer` counts, that of the others does not: one rank has to know the handle.
  [[nodiscard]] MessageQueue create_mq_broadcaster(QueueOptions options = {});
  struct SingleReaderQueues {
    std::shared_ptr<MessageQueue> own;                     ///< that this rank writes
    std::vector<std::shared_ptr<MessageQueue>> by_writer;  ///< on the reader: of all ranks, its own among them
  };
  /// A queue from each rank to one of them. `options`: without writer, reader and outside_writer.
  [[nodiscard]] SingleReaderQueues create_single_reader_mq_broadcasters(int reader_rank = 0, QueueOptions options = {});

  /// Collective. Takes memory for what a model's layers give to the collectives that have shared results: a later
  /// all_reduce_shared() or all_gather_shared() of process_group(), of a tensor no larger than the largest of these,
  /// takes none if each rank has dropped the results of earlier ones. `tensors`: the same on all ranks. Nothing if the
  /// ranks share no memory. Throws as all_gather_shared().
  void prepare_communication_buffer_for_model(std::span<const TensorSpec> tensors,
                                              const CollectiveOptions& options = {});

  // From one rank to another: to the next and from the one before, where none is given. In a group of one that is this
  // rank, which cannot send to itself: Error(argument).

  void send_object(const Config& object, int dst, const CollectiveOptions& options = {});
  [[nodiscard]] Config recv_object(int src, const CollectiveOptions& options = {});
  void send(const TensorView& tensor, std::optional<int> dst = {}, const CollectiveOptions& options = {});
  /// Throws Error(rank_mismatch) if what has come is another one.
  [[nodiscard]] Tensor recv(const TensorSpec& spec, std::optional<int> src = {}, const CollectiveOptions& options = {});

  struct TensorDictOptions {
    /// Ranks of this group have the same tensors: each sends its slice of them to the rank of its number in the next
    /// stage, where they are gathered by this group again. Null: all is sent.
    GroupCoordinator* all_gather_group = nullptr;
    /// By key: whether to slice a tensor. One that is not named is sliced if the number of its elements allows it.
    std::map<std::string, bool> all_gather_tensors = {};
    CollectiveOptions waits = {};
  };
  /// `dict`: values at its top level are tensors or any Config. Both sides give the same options, and the ranks of a
  /// stage the same keys, in any order. If the receivers get slices that do not fit together or another message, all
  /// ranks of their all_gather_group throw Error(rank_mismatch).
  void send_tensor_dict(const ConfigObject& dict, std::optional<int> dst, const TensorDictOptions& options);
  void send_tensor_dict(const ConfigObject& dict, std::optional<int> dst = {}) { send_tensor_dict(dict, dst, {}); }
  [[nodiscard]] ConfigObject recv_tensor_dict(std::optional<int> src, const TensorDictOptions& options);
  [[nodiscard]] ConfigObject recv_tensor_dict(std::optional<int> src = {}) { return recv_tensor_dict(src, {}); }

  /// Of a mixture of experts: the rows of all ranks, of each tensor that goes with them (hidden states, router logits
  /// or weights and ids, more), and how many each rank gave.
  struct Dispatched {
    std::vector<Tensor> tensors;
    std::vector<std::int64_t> sizes;
  };
  [[nodiscard]] Dispatched dispatch(std::span<const TensorView> tensors, const CollectiveOptions& options = {});
  /// Back: the sum of what all ranks made of all rows, of this rank's rows.
  [[nodiscard]] Tensor combine(const TensorView& hidden, std::span<const std::int64_t> sizes,
                               const CollectiveOptions& options = {});

 private:
  /// Collective. Throws Error(rank_mismatch) on all ranks unless all of them gather the same tensors.
  void check_same_slices(const ConfigObject& values, const std::map<std::string, Shape>& shapes,
                         const CollectiveOptions& options);
  [[nodiscard]] int next() const noexcept { return (rank_in_group() + 1) % world_size(); }
  [[nodiscard]] int prev() const noexcept { return (rank_in_group() + world_size() - 1) % world_size(); }

  std::vector<int> ranks_;
  std::string unique_name_;
  std::unique_ptr<ProcessGroup> group_;
  std::unique_ptr<MessageQueue> queue_;  // of broadcast_object
};

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// GroupCoordinator: one of the groups that the ranks of a model are divided into (tensor parallel, pipeline parallel,
// ...). Semantics: the calls and defaults of the class of that name in vLLM, on a ProcessGroup. The differences:
// negative ranks are errors, any dimension can be scattered, a group of one rank returns copies as larger groups do,
// and objects are Configs instead of pickles.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/message_queue.hpp"
#include "muster/process_group.hpp"

namespace muster {

/// Options of a GroupCoordinator; the same on all ranks.
struct GroupCoordinatorOptions {
  /// If true, broadcast_object() from rank 0 uses a MessageQueue, whose writer does not wait for the readers. The ranks
  /// of each group must then share memory. Otherwise the constructor throws Error(unsupported) on all of them.
  bool use_message_queue_broadcaster = false;
  /// The deadline and the stop request of the constructor.
  CollectiveOptions wait = {};
};

/// Collectives and messages of one group. `src` and `dst` are ranks in the group. rank(), ranks() and the neighbours
/// are numbers of the group that the coordinator was made from. Results are new tensors. Calls are collective over the
/// group and throw as those of ProcessGroup.
class GroupCoordinator {
 public:
  /// Divides `world` into groups. Collective over `world`: all of its ranks pass the same lists, and each rank is in
  /// exactly one of them. `name` and a number form unique_name(). Throws Error(invalid_argument) if a rank is in no
  /// list or in two, Error(rank_mismatch) if ranks pass different lists.
  GroupCoordinator(std::span<const std::vector<int>> group_ranks, Group& world, std::string_view name = "group",
                   const GroupCoordinatorOptions& options = {});

  /// Returns the number of this rank in `world`.
  [[nodiscard]] int rank() const noexcept { return ranks_[static_cast<std::size_t>(rank_in_group())]; }
  /// Returns the ranks of the group, by their numbers in the group that the coordinator was made from.
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// Returns the number of this rank in the group.
  [[nodiscard]] int rank_in_group() const noexcept { return group_->rank(); }
  /// Returns the number of ranks of the group.
  [[nodiscard]] int world_size() const noexcept { return group_->size(); }
  /// Returns the first entry of ranks().
  [[nodiscard]] int first_rank() const noexcept { return ranks_.front(); }
  /// Returns the last entry of ranks().
  [[nodiscard]] int last_rank() const noexcept { return ranks_.back(); }
  /// Returns whether this rank is first_rank().
  [[nodiscard]] bool is_first_rank() const noexcept { return rank_in_group() == 0; }
  /// Returns whether this rank is last_rank().
  [[nodiscard]] bool is_last_rank() const noexcept { return rank_in_group() == world_size() - 1; }
  /// Return the neighbours in the list of ranks. The last rank is followed by the first.
  [[nodiscard]] int next_rank() const noexcept { return ranks_[static_cast<std::size_t>(next())]; }
  /// Returns the neighbour before this rank. The first rank is preceded by the last.
  [[nodiscard]] int prev_rank() const noexcept { return ranks_[static_cast<std::size_t>(prev())]; }
  /// Returns "NAME:0", "NAME:1", ..., counting the groups with this name in this process.
  [[nodiscard]] const std::string& unique_name() const noexcept { return unique_name_; }
  /// Returns the group that the calls use.
  [[nodiscard]] ProcessGroup& process_group() const noexcept { return *group_; }

  /// Returns when all ranks of the group have entered the barrier.
  void barrier(const CollectiveOptions& options = {}) { group_->barrier(options); }
  /// Returns the sum of the tensors of all ranks.
  [[nodiscard]] Tensor all_reduce(const TensorView& tensor, const CollectiveOptions& options = {});
  /// Returns the tensors of all ranks, concatenated along `dim`.
  [[nodiscard]] Tensor all_gather(const TensorView& tensor, int dim = -1, const CollectiveOptions& options = {});
  /// Returns the tensors of all ranks, concatenated along `dim`, whose extent may differ between ranks. If `sizes` is
  /// not empty, it has the extent of every rank, and is checked.
  [[nodiscard]] Tensor all_gatherv(const TensorView& tensor, int dim = 0, std::span<const std::int64_t> sizes = {},
                                   const CollectiveOptions& options = {});
  /// Concatenates several tensors, as above.
  [[nodiscard]] std::vector<Tensor> all_gatherv(std::span<const TensorView> tensors, int dim = 0,
                                                std::span<const std::int64_t> sizes = {},
                                                const CollectiveOptions& options = {});
  /// Sums the tensors of all ranks, splits the result equally along `dim`, and returns the slice of this rank.
  [[nodiscard]] Tensor reduce_scatter(const TensorView& tensor, int dim = -1, const CollectiveOptions& options = {});
  /// Does the same as reduce_scatter(), with the extent of each slice in `sizes`.
  [[nodiscard]] Tensor reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim = -1,
                                       const CollectiveOptions& options = {});
  /// Returns the tensors of all ranks, concatenated along `dim`, on `dst`; nullopt on the other ranks.
  [[nodiscard]] std::optional<Tensor> gather(const TensorView& tensor, int dst = 0, int dim = -1,
                                             const CollectiveOptions& options = {});
  /// Copies the elements of `src` into the tensor of every rank.
  void broadcast(const Tensor& tensor, int src = 0, const CollectiveOptions& options = {});

  /// Returns the object of `src` on all ranks. Large tensors that were sent through the queue are read-only
  /// (MessageQueue::get_config).
  [[nodiscard]] Config broadcast_object(const Config& object, int src = 0, const CollectiveOptions& options = {});
  /// Returns the dictionary of `src` on all ranks, with its tensors and in its order of keys.
  [[nodiscard]] ConfigObject broadcast_tensor_dict(const ConfigObject& dict, int src = 0,
                                                   const CollectiveOptions& options = {});

  // Queues between the ranks of this group, which must share memory; otherwise Error(unsupported) on all of them.
  // Collective. When the call returns, the queues are ready on all ranks.

  /// Creates a queue that `writer` writes and all ranks read. `external_writer` is used on the rank `writer` only, so
  /// only that rank must know the handle.
  [[nodiscard]] MessageQueue create_mq_broadcaster(QueueOptions options = {});
  /// The queues of create_single_reader_mq_broadcasters().
  struct SingleReaderQueues {
    std::shared_ptr<MessageQueue> own;                     ///< the queue that this rank writes
    std::vector<std::shared_ptr<MessageQueue>> by_writer;  ///< on the reader: the queues of all ranks, its own included
  };
  /// Creates one queue from each rank to `reader_rank`. `options` must not set writer, reader or external_writer.
  [[nodiscard]] SingleReaderQueues create_single_reader_mq_broadcasters(int reader_rank = 0, QueueOptions options = {});

  /// Reserves memory for the shared results of the collectives of a model. Collective. A later all_reduce_shared() or
  /// all_gather_shared() of process_group() then allocates no memory, if its tensor is not larger than the largest of
  /// `tensors` and each rank has dropped the earlier results. `tensors` is the same on all ranks. Does nothing if the
  /// ranks share no memory. Throws as all_gather_shared().
  void prepare_communication_buffer_for_model(std::span<const TensorSpec> tensors,
                                              const CollectiveOptions& options = {});

  // Messages from one rank to another. By default they are sent to the next rank and received from the previous one. In
  // a group of one rank these calls throw Error(invalid_argument), because a rank cannot send to itself.

  /// Sends an object to `dst`.
  void send_object(const Config& object, int dst, const CollectiveOptions& options = {});
  /// Returns the next object from `src`.
  [[nodiscard]] Config recv_object(int src, const CollectiveOptions& options = {});
  /// Sends a tensor to `dst`.
  void send(const TensorView& tensor, std::optional<int> dst = {}, const CollectiveOptions& options = {});
  /// Returns the next tensor from `src`. Throws Error(rank_mismatch) if it does not match `spec`.
  [[nodiscard]] Tensor recv(const TensorSpec& spec, std::optional<int> src = {}, const CollectiveOptions& options = {});

  /// Options of send_tensor_dict() and recv_tensor_dict().
  struct TensorDictOptions {
    /// A group whose ranks have the same tensors. Each rank sends only its slice, to the rank with the same number in
    /// the next stage. The receiving stage gathers the slices with its own group. Null: everything is sent.
    GroupCoordinator* all_gather_group = nullptr;
    /// Whether to slice a tensor, by key. Other tensors are sliced if their number of elements is divisible.
    std::map<std::string, bool> all_gather_tensors = {};
    /// The deadline and the stop request of the call.
    CollectiveOptions wait = {};
  };
  /// Sends a dictionary to `dst`. Its values are tensors or any Configs. Sender and receiver pass the same options, and
  /// the ranks of a stage have the same keys, in any order. If the receivers get slices that do not match, or another
  /// message, all ranks of their all_gather_group throw Error(rank_mismatch).
  void send_tensor_dict(const ConfigObject& dict, std::optional<int> dst, const TensorDictOptions& options);
  /// Sends a dictionary with the default options.
  void send_tensor_dict(const ConfigObject& dict, std::optional<int> dst = {}) { send_tensor_dict(dict, dst, {}); }
  /// Returns the next dictionary from `src`.
  [[nodiscard]] ConfigObject recv_tensor_dict(std::optional<int> src, const TensorDictOptions& options);
  /// Returns the next dictionary from `src`, with the default options.
  [[nodiscard]] ConfigObject recv_tensor_dict(std::optional<int> src = {}) { return recv_tensor_dict(src, {}); }

  /// The result of dispatch(): for each input tensor the rows of all ranks, and the number of rows of each rank.
  struct Dispatched {
    /// For each input tensor: the rows of all ranks, in rank order.
    std::vector<Tensor> tensors;
    /// The number of rows of each rank.
    std::vector<std::int64_t> sizes;
  };
  /// Gathers the rows of all ranks for a mixture of experts, for each of several tensors with the same rows (hidden
  /// states, router logits or weights and ids, others).
  [[nodiscard]] Dispatched dispatch(std::span<const TensorView> tensors, const CollectiveOptions& options = {});
  /// Reverses dispatch(): returns the sum over all ranks of the rows that belong to this rank. `hidden` has all rows;
  /// `sizes` is that of Dispatched.
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
  std::unique_ptr<MessageQueue> queue_;  // used by broadcast_object()
};

}  // namespace muster

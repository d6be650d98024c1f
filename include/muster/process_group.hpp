// SPDX-License-Identifier: Apache-2.0
#pragma once
// ProcessGroup: collectives on the ranks of a Group, for tensors and for Configs. Semantics: the collectives of
// torch.distributed and MPI, with two additions. Reductions combine the ranks in a fixed order, so the result has the
// same bits on all ranks. Any disagreement between ranks about a call is an error on all of them.

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/group.hpp"
#include "muster/tensor.hpp"
#include "muster/work.hpp"

namespace muster {

/// The operation of a reduction, applied to the elements of all ranks in rank order. If the group spans several hosts
/// and one of them has at least two ranks, the elements of each host are combined first. Exception: floats narrower
/// than 32 bits are always combined in rank order. They are accumulated in f32 and rounded once. max and min return NaN
/// if any rank has NaN. average requires a float dtype. bool supports max (or), min (and) and product (and). Packed
/// types, f8_e8m0, the FNUZ types and complex64 cannot be reduced.
enum class ReduceOp : std::uint8_t { sum, product, min, max, average };

/// Options of all calls of a ProcessGroup. A stop request cancels the wait and fails the group.
struct CollectiveOptions {
  /// The longest wait without progress of the awaited ranks. Unset: the default of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Cancels the wait.
  std::stop_token stop = {};
};

/// Wildcards for receiving from any rank or with any tag. They are not valid ranks or tags.
inline constexpr int any_rank = std::numeric_limits<int>::min();
/// Receives a message with any tag.
inline constexpr int any_tag = std::numeric_limits<int>::min();

/// The sender, tag and size of a message that has arrived.
struct MessageInfo {
  /// The rank of the sender.
  int from = 0;
  /// The tag of the message.
  int tag = 0;
  std::uint64_t bytes = 0;  ///< size of its tensors
};
/// A received config with its sender and tag.
struct ReceivedConfig {
  /// The rank of the sender.
  int from = 0;
  /// The tag of the message.
  int tag = 0;
  /// The config.
  Config config = {};
};

class ProcessGroup;
namespace collectives {
class Engine;
/// For the other libraries of Muster.
Engine& engine_of(ProcessGroup& group) noexcept;
}  // namespace collectives

/// Collectives and messages on the ranks of a group. These rules apply to all calls:
/// - Collective means collective over the group: each rank makes the same calls in the same order. `root`, `to` and
///   `from` are ranks of this group. A negative rank is an error.
/// - An invalid argument on any rank (a root that does not exist, a result that does not fit, a dtype without that
///   reduction) throws Error(invalid_argument | unsupported) on all ranks, with the message of that rank. If ranks
///   disagree about call, operation, dtype, shape or root, all throw Error(rank_mismatch), which names two of them. No
///   element has been written in these cases, and the group remains usable.
/// - If a rank dies, hangs until the deadline or cancels while elements are transferred, the group fails. All ranks
///   throw, in this call and in each later one, as with Group. The contents of the result tensors are then
///   unspecified.
/// - Tensors are in host memory. Inputs may be strided; results are contiguous. The caller may reuse an input when the
///   call returns. A result must not overlap an input of another rank or of another call.
/// - In a program with libmuster-cuda, all ranks may pass contiguous tensors on a GPU of each rank. The call then uses
///   NCCL (muster/cuda.hpp; docs/reference/gpu.md, "Collectives"), which adds in its own order. It returns when the
///   operation is queued in the stream of the thread. Until the GPU has finished it (wait_for_devices()), inputs must
///   not change and results are not available. barrier() does not wait for a GPU. For messages, shared results and
///   Configs, call copy_to_host() first.
/// - Ranks that share memory read larger inputs in a SharedArena in place, without a copy.
/// - One thread at a time, as with Group. Collectives and messages of a ProcessGroup are separate from those of the
///   Group that it was made from.
class ProcessGroup {
 public:
  /// Creates a process group of all ranks of `group`, with the same numbers. Collective over `group`. It has separate
  /// rounds, messages and failures (Group::duplicate) and may outlive `group`. Throws as duplicate().
  explicit ProcessGroup(Group& group, const CollectiveOptions& options = {});
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;
  /// Local; does not wait. Exception: after calls with tensors on GPUs it waits as wait_for_devices(), without
  /// throwing, and up to a second for the other ranks to destroy their group.
  ~ProcessGroup();

  /// Returns the number of this rank in the group.
  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  /// Returns the number in the job (RankInfo::rank) of a rank of this group. Throws Error(invalid_argument) if the
  /// group has no such rank. Local.
  [[nodiscard]] int global_rank(int rank) const;
  /// Returns the rank in this group of the rank that has the number `global` in the job; nullopt if it is not in this
  /// group. Local.
  [[nodiscard]] std::optional<int> group_rank(int global) const noexcept;
  /// Returns the transport of the elements. It is "shared memory" if all ranks share a host. It is "shared memory, and
  /// messages between hosts" if there are several hosts and one has at least two ranks. Otherwise it is "messages",
  /// sent by the group that this one was made from. Local.
  [[nodiscard]] std::string_view backend() const noexcept;
  /// Returns the private group of this process group, for deadlines, failures and messages outside of collectives.
  /// Valid as long as this object. Local.
  [[nodiscard]] Group& group() const noexcept;
  /// Returns a process group of the ranks of a list, in the order of the list; null on a rank that is in no list.
  /// Collective over this group. Rules and errors are those of Group::split().
  [[nodiscard]] std::unique_ptr<ProcessGroup> split(const RankList& ranks, const CollectiveOptions& options = {});

  /// Returns when all ranks have entered the barrier. Collective. Throws as Group::barrier().
  void barrier(const CollectiveOptions& options = {});
  /// Waits until the GPUs of this rank have finished the work that calls of this group have queued. Returns at once if
  /// no call had tensors on GPUs. Local. In contrast to a wait of CUDA, it also ends if a rank dies, leaves or fails in
  /// the meantime, or the deadline passes. It then throws Error(peer_lost | timeout | cancelled | io), and the group
  /// has failed.
  void wait_for_devices(const CollectiveOptions& options = {});

  // Collectives for tensors of the same dtype and shape on all ranks.

  /// Reduces the tensors of all ranks in place. `tensor` is contiguous and writable.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, const CollectiveOptions& options = {});
  /// Reduces the tensors of all ranks into `out` on every rank. `out` is contiguous and writable, has the dtype and
  /// shape of the input, and does not overlap it.
  void all_reduce_into(const Tensor& out, const TensorView& tensor, ReduceOp op = ReduceOp::sum,
                       const CollectiveOptions& options = {});
  /// Returns one reduced tensor that all ranks map read-only. It exists until the last rank has dropped it, even if
  /// other ranks have died. If the ranks share no memory, each rank gets a private copy.
  [[nodiscard]] Tensor all_reduce_shared(const TensorView& tensor, ReduceOp op = ReduceOp::sum,
                                         const CollectiveOptions& options = {});
  /// Concatenates the tensors of all ranks along dimension 0 into one tensor that all ranks map, as
  /// all_reduce_shared().
  [[nodiscard]] Tensor all_gather_shared(const TensorView& tensor, const CollectiveOptions& options = {});
  /// Reduces the tensors of all ranks into the tensor of `root`. The tensors of the other ranks are not changed.
  void reduce(const Tensor& tensor, int root, ReduceOp op = ReduceOp::sum, const CollectiveOptions& options = {});
  /// Copies the elements of `root` into the tensor of every rank. `tensor` is contiguous on all ranks, and writable on
  /// all ranks except `root`.
  void broadcast(const Tensor& tensor, int root, const CollectiveOptions& options = {});
  /// Reduces the tensors of all ranks, splits the result along `dim` into size() equal slices, and returns the slice of
  /// this rank. A negative `dim` counts from the end.
  [[nodiscard]] Tensor reduce_scatter(const TensorView& tensor, int dim = 0, ReduceOp op = ReduceOp::sum,
                                      const CollectiveOptions& options = {});
  /// Does the same as reduce_scatter() with slices of different extents. `sizes` has the extent of the slice of each
  /// rank and is the same on all ranks. The sum of `sizes` is the extent of the tensor along `dim`.
  [[nodiscard]] Tensor reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim = 0,
                                       ReduceOp op = ReduceOp::sum, const CollectiveOptions& options = {});
  /// Does the same as reduce_scatter() along dimension 0, and writes the slice into `out`, which is contiguous,
  /// writable and of the shape of the slice.
  void reduce_scatter_into(const Tensor& out, const TensorView& tensor, ReduceOp op = ReduceOp::sum,
                           const CollectiveOptions& options = {});
  /// Returns the concatenation of the tensors of all ranks along `dim`, in rank order. A negative `dim` counts from the
  /// end.
  [[nodiscard]] Tensor all_gather(const TensorView& tensor, int dim = 0, const CollectiveOptions& options = {});
  /// Concatenates the tensors of all ranks along dimension 0 into `out`, which is contiguous, writable and of the shape
  /// of the result.
  void all_gather_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options = {});
  /// Copies the tensor of each rank into a separate tensor. `outs` has one contiguous writable tensor per rank, in rank
  /// order. The extents of dimension 0 may differ between ranks. Every rank passes the same extents.
  void all_gather_into(std::span<const Tensor> outs, const TensorView& tensor, const CollectiveOptions& options = {});
  /// Returns the concatenation of the tensors of all ranks along `dim` on `root`, and nullopt on the other ranks.
  [[nodiscard]] std::optional<Tensor> gather(const TensorView& tensor, int root, int dim = 0,
                                             const CollectiveOptions& options = {});
  /// Concatenates the tensors of all ranks along dimension 0 into `out` of `root`, which is contiguous, writable and of
  /// the shape of the result. `out` is ignored on the other ranks.
  void gather_into(const Tensor& out, const TensorView& tensor, int root, const CollectiveOptions& options = {});
  /// Copies the tensor of each rank into a tensor of `root`. On `root`, `outs` has one contiguous writable tensor of
  /// that shape per rank; on the other ranks it is empty.
  void gather_into(std::span<const Tensor> outs, const TensorView& tensor, int root,
                   const CollectiveOptions& options = {});
  /// Copies the part of this rank from `root` into `out`, which is contiguous and writable. On `root`, `parts` has one
  /// tensor per rank, of the dtype and shape of `out`; on the other ranks it is empty.
  void scatter(const Tensor& out, std::span<const TensorView> parts, int root, const CollectiveOptions& options = {});
  /// Splits the tensor of each rank along dimension 0 into size() equal slices, and sends slice r to rank r. Returns
  /// the received slices, concatenated in rank order.
  [[nodiscard]] Tensor all_to_all(const TensorView& tensor, const CollectiveOptions& options = {});
  /// Does the same as all_to_all(), and writes the result into `out`. `out` is contiguous and writable, has the shape
  /// of the tensor, and does not overlap it.
  void all_to_all_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options = {});

  // Collectives for tensors of the same dtype whose shapes differ in at most one extent.

  /// Does the same as all_gather(), except that the extents along `dim` may differ. If `sizes` is not empty, it has the
  /// extent of every rank and is the same on all ranks.
  [[nodiscard]] Tensor all_gatherv(const TensorView& tensor, int dim = 0, std::span<const std::int64_t> sizes = {},
                                   const CollectiveOptions& options = {});
  /// Does the same as gather(), except that the extents along `dim` may differ.
  [[nodiscard]] std::optional<Tensor> gatherv(const TensorView& tensor, int root, int dim = 0,
                                              const CollectiveOptions& options = {});
  /// Sends rows[r] rows of dimension 0 to each rank r, in order. The sum of `rows` is the number of rows of `tensor`.
  /// Returns the rows received from all ranks, in rank order. If `received` is not null, it receives the number of rows
  /// from each rank.
  [[nodiscard]] Tensor all_to_allv(const TensorView& tensor, std::span<const std::int64_t> rows,
                                   std::vector<std::int64_t>* received = nullptr,
                                   const CollectiveOptions& options = {});

  // Collectives for Configs: any values, with or without tensors in host memory. Received Configs own their memory.

  /// Returns the config of `root` on all ranks. `config` is ignored on the other ranks.
  [[nodiscard]] Config broadcast_config(const Config& config, int root, const CollectiveOptions& options = {});
  /// Returns the configs of all ranks, in rank order.
  [[nodiscard]] std::vector<Config> all_gather_config(const Config& config, const CollectiveOptions& options = {});
  /// Returns the configs of all ranks, in rank order, on `root`; the result is empty on the other ranks.
  [[nodiscard]] std::vector<Config> gather_config(const Config& config, int root,
                                                  const CollectiveOptions& options = {});

  // Point-to-point messages. A tag is 0 or more. Messages with the same tag arrive in the order in which they were
  // sent. `from` may be any_rank, and the `tag` of a receive may be any_tag. A receiver buffers about 256 KiB of
  // messages per sender until it receives them. For a longer message, or one that does not fit, send() waits until it
  // is received, and a timeout names the receiver. Therefore two ranks that both first send a large message to each
  // other wait for each other. Use isend(), which does not wait.

  /// Sends a tensor to the rank `to`. Throws Error(invalid_argument) if `to` is this rank or not a rank of the group,
  /// or if the tag is negative. Otherwise throws as Group::send().
  void send(const TensorView& tensor, int to, int tag = 0, const CollectiveOptions& options = {});
  /// Sends a config. Throws as send().
  void send_config(const Config& config, int to, int tag = 0, const CollectiveOptions& options = {});
  /// Receives a tensor into `out`, which is contiguous and writable. Returns the rank of the sender. Throws
  /// Error(rank_mismatch) if the message has another dtype or shape; the message is then lost, and the group remains
  /// usable. A receive from any_rank fails if any rank dies or leaves.
  int recv(const Tensor& out, int from, int tag = 0, const CollectiveOptions& options = {});
  /// Receives a config. Throws as recv().
  [[nodiscard]] Config recv_config(int from, int tag = 0, const CollectiveOptions& options = {});
  /// Receives a config together with its sender and tag. Throws as recv().
  [[nodiscard]] ReceivedConfig recv_message(int from, int tag = any_tag, const CollectiveOptions& options = {});
  /// Returns the message that a receive with these arguments would return, if it has arrived. Local; does not wait.
  [[nodiscard]] std::optional<MessageInfo> probe(int from, int tag = any_tag);

  // Messages without waiting. A message that has started makes progress while this rank waits for anything, in any
  // group: for messages, in collectives, in gathers and streams, or in Work::get() (the progress rule of MPI).
  // Work::get() waits for as long as `options` allow, and throws as the calls above. A tensor is kept alive until it
  // has been sent or received; the caller keeps a borrowed one alive. Destroying the group discards a message that has
  // not been transferred.

  /// Starts to send a tensor. Throws as send().
  [[nodiscard]] Work<void> isend(Tensor tensor, int to, int tag = 0, const CollectiveOptions& options = {});
  /// Starts to send a config. Throws as send().
  [[nodiscard]] Work<void> isend_config(const Config& config, int to, int tag = 0,
                                        const CollectiveOptions& options = {});
  /// Starts to receive a tensor into `out`. The result is the rank of the sender.
  [[nodiscard]] Work<int> irecv(const Tensor& out, int from, int tag = 0, const CollectiveOptions& options = {});
  /// Starts to receive a config.
  [[nodiscard]] Work<ReceivedConfig> irecv_config(int from, int tag = 0, const CollectiveOptions& options = {});

  // Calls that run while the caller continues.

  /// Runs call(group) on a separate thread, on a duplicate of this group, while the caller continues:
  /// `group.start([=](ProcessGroup& own) { own.all_reduce(gradient); })`. Collective: all ranks start the same calls in
  /// the same order. Started calls run in that order, one after another, independently of the calls of this group. The
  /// first call creates the duplicate. Memory that the call reads or writes must stay valid until the Work is done. The
  /// return value of the call is the result of the Work, and its exceptions are thrown by Work::get(). A failure of the
  /// duplicate also fails this group. With MPI it requires MPI_THREAD_MULTIPLE. Destroying the group waits for the
  /// started calls.
  template <class Call>
  auto start(Call call) {
    auto task = detail::task_of<ProcessGroup>(std::move(call), [](ProcessGroup& own) { own.pass_on_failure(); });
    add_task(std::move(task.run));
    return std::move(task.work);
  }

 private:
  friend collectives::Engine& collectives::engine_of(ProcessGroup& group) noexcept;
  explicit ProcessGroup(std::shared_ptr<Group> group, const CollectiveOptions& options);
  void add_task(std::function<void(ProcessGroup&)> task);
  void pass_on_failure() noexcept;

  struct Async;
  std::shared_ptr<collectives::Engine> engine_;
  std::shared_ptr<Async> async_;  // runs the started calls
  std::weak_ptr<void> runs_in_;   // in a duplicate that runs started calls: the tasks of its thread
};

}  // namespace muster

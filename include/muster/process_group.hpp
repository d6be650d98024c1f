// SPDX-License-Identifier: Apache-2.0
#pragma once
// ProcessGroup: collectives on the ranks of a SyncGroup, for tensors and for Configs. Semantics: the collectives of
// torch.distributed and MPI, with what those leave open decided: reductions take the ranks in their order, so that all
// ranks have the same bits; whatever the ranks disagree about is an error on all of them.

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
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"
#include "muster/work.hpp"

namespace muster {

/// What becomes of the elements of all ranks, taken in their order; with several hosts, one of two ranks or more, first
/// those of each host (but for floats narrower than 32 bits). Floats narrower than 32 bits are added up in f32 and
/// rounded once. max and min: NaN of any rank gives NaN. average: of floats alone. bool has max (or), min and product
/// (and). Packed types, f8_e8m0, the FNUZ types and complex64 have none.
enum class ReduceOp : std::uint8_t { sum, product, min, max, average };

struct CollectiveOptions {
  /// The longest wait without progress of the ranks waited for; none: the group's own.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::stop_token stop = {};
};

/// Instead of a rank or a tag to receive from: whatever comes first. No number of a rank or a tag.
inline constexpr int any_rank = std::numeric_limits<int>::min();
inline constexpr int any_tag = std::numeric_limits<int>::min();

/// A message that has come.
struct MessageInfo {
  int from = 0;
  int tag = 0;
  std::uint64_t bytes = 0;  ///< of its tensors
};
struct ReceivedConfig {
  int from = 0;
  int tag = 0;
  Config config = {};
};

class ProcessGroup;
namespace collectives {
class Engine;
/// For Muster's other libraries.
Engine& engine_of(ProcessGroup& group) noexcept;
}  // namespace collectives

/// Rules of all calls:
/// - Collective over the group: each rank makes the same calls in the same order. `root`, `to`, `from` are ranks of
/// this
///   group; none is a default, and a negative one is an error.
/// - Arguments that cannot be (a root that is not there, a result that does not fit, a dtype that has no such
///   reduction) on any rank are Error(argument | unsupported) on all, with that rank's words; ranks that disagree about
///   call, operation, dtype, shape or root get Error(rank_mismatch) that names two of them. No element has been
///   written then, and the group goes on.
/// - A rank that dies, hangs until the deadline, or cancels while elements move fails the group: all ranks throw, now
///   and in each later call, as those of SyncGroup. What the results have in them then is not told.
/// - Tensors are in host memory; inputs may be strided, results are contiguous. An input is the caller's again when the
///   call returns. A result must not overlap another rank's or call's input.
/// - In a program with libmuster-cuda the tensors of a call may be on a device of each rank, contiguous, and go by NCCL
///   (muster/cuda.hpp; docs/devices.md, "Collectives"), which adds up in its own order. The call returns when it is in
///   the stream that is named: until the device has done it (wait_for_devices()), inputs must stay as they are, and
///   results are not there. barrier() waits for no device. Messages, shared results and Configs: copy_to_host() first.
/// - Ranks that share memory read larger inputs in a SharedArena where they lie: those are not copied.
/// - One thread at a time, as with SyncGroup. Collectives and messages of a ProcessGroup never meet those of the
///   SyncGroup that it was made of.
class ProcessGroup {
 public:
  /// Collective over `group`: of all of its ranks, with the same numbers. It has rounds, messages and failures of its
  /// own (SyncGroup::duplicate), and outlives `group`. Throws as duplicate().
  explicit ProcessGroup(SyncGroup& group, const CollectiveOptions& options = {});
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;
  /// Local, never waits; but for calls with tensors on devices it waits as wait_for_devices() does, without a word, and
  /// for a second for the other ranks' ends.
  ~ProcessGroup();

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  /// What the job calls a rank of this group (RankInfo::rank). Throws Error(argument) if there is no such rank.
  [[nodiscard]] int global_rank(int rank) const;
  /// The rank of this group that the job calls so; none if it is not in it.
  [[nodiscard]] std::optional<int> rank_of_global(int global) const noexcept;
  /// What carries the elements: "shared memory"; "shared memory, and messages between hosts" if there are several hosts
  /// and one has two ranks or more; "messages" (of the group that it was made of) else.
  [[nodiscard]] std::string_view backend() const noexcept;
  /// Its own: for deadlines, failures and messages beside collectives. Lives as long as this.
  [[nodiscard]] SyncGroup& group() const noexcept;
  /// Collective over this group. The ranks of a list, in its order, as SyncGroup::split; null on a rank that is in
  /// none.
  [[nodiscard]] std::unique_ptr<ProcessGroup> split(const RankList& ranks, const CollectiveOptions& options = {});

  void barrier(const CollectiveOptions& options = {});
  /// Local. Returns when this rank's devices have done what this group's calls have put into their streams: at once if
  /// there were none with tensors on devices. Unlike a wait of CUDA it throws if a rank dies, leaves or fails
  /// meanwhile, or the deadline is over: Error(peer_lost | timeout | cancelled | io), and the group has failed.
  void wait_for_devices(const CollectiveOptions& options = {});

  // The same dtype and shape on all ranks.

  /// In place. `tensor` is contiguous and writable.
  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::sum, const CollectiveOptions& options = {});
  /// `out`: contiguous, writable, of the input's dtype and shape, and not its memory.
  void all_reduce_into(const Tensor& out, const TensorView& tensor, ReduceOp op = ReduceOp::sum,
                       const CollectiveOptions& options = {});
  /// One result for all ranks: each has it mapped, and may only read it. It stays until the last of them has dropped
  /// it, whoever has died by then. In their own memory instead if they share none.
  [[nodiscard]] Tensor all_reduce_shared(const TensorView& tensor, ReduceOp op = ReduceOp::sum,
                                         const CollectiveOptions& options = {});
  /// Likewise; along dimension 0.
  [[nodiscard]] Tensor all_gather_shared(const TensorView& tensor, const CollectiveOptions& options = {});
  /// The result is in root's tensor; the others' stay as they are.
  void reduce(const Tensor& tensor, int root, ReduceOp op = ReduceOp::sum, const CollectiveOptions& options = {});
  /// Root's elements come into all tensors. Contiguous, and writable on all ranks but root.
  void broadcast(const Tensor& tensor, int root, const CollectiveOptions& options = {});
  /// What each rank has, cut along `dim` into size() equal slices and reduced; this rank's slice. `dim` counts from the
  /// end if it is negative.
  [[nodiscard]] Tensor reduce_scatter(const TensorView& tensor, int dim = 0, ReduceOp op = ReduceOp::sum,
                                      const CollectiveOptions& options = {});
  /// Likewise; `sizes`: the extent of each rank's slice, the same on all ranks, whose sum is the tensor's extent.
  [[nodiscard]] Tensor reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim = 0,
                                       ReduceOp op = ReduceOp::sum, const CollectiveOptions& options = {});
  /// Along dimension 0, into `out`: contiguous, writable, of that slice's shape.
  void reduce_scatter_into(const Tensor& out, const TensorView& tensor, ReduceOp op = ReduceOp::sum,
                           const CollectiveOptions& options = {});
  /// All tensors, one behind the other along `dim` in the order of the ranks.
  [[nodiscard]] Tensor all_gather(const TensorView& tensor, int dim = 0, const CollectiveOptions& options = {});
  /// Along dimension 0, into `out`: contiguous, writable, of that shape.
  void all_gather_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options = {});
  /// Into tensors of their own, one for each rank in their order, contiguous and writable. Their extents of dimension 0
  /// may differ, and are the same on all ranks.
  void all_gather_into(std::span<const Tensor> outs, const TensorView& tensor, const CollectiveOptions& options = {});
  /// The same on root; nothing on the others.
  [[nodiscard]] std::optional<Tensor> gather(const TensorView& tensor, int root, int dim = 0,
                                             const CollectiveOptions& options = {});
  /// Along dimension 0, into root's `out`: contiguous, writable, of that shape; the others' is not looked at.
  void gather_into(const Tensor& out, const TensorView& tensor, int root, const CollectiveOptions& options = {});
  /// Into root's tensors, one of that shape for each rank; `outs` of the others is empty.
  void gather_into(std::span<const Tensor> outs, const TensorView& tensor, int root,
                   const CollectiveOptions& options = {});
  /// This rank's of root's tensors comes into `out`, contiguous and writable. `parts`: on root one for each rank, of
  /// its dtype and shape; empty on the others.
  void scatter(const Tensor& out, std::span<const TensorView> parts, int root, const CollectiveOptions& options = {});
  /// Cut along dimension 0 into size() equal slices, of which each rank gets one of each rank, in the order of the
  /// ranks.
  [[nodiscard]] Tensor all_to_all(const TensorView& tensor, const CollectiveOptions& options = {});
  /// Into `out`: contiguous, writable, of the tensor's shape, and not its memory.
  void all_to_all_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options = {});

  // The same dtype, and shapes that differ in one extent at most.

  /// As all_gather; the extents along `dim` may differ. `sizes`, if given, are those of all ranks, the same on all.
  [[nodiscard]] Tensor all_gatherv(const TensorView& tensor, int dim = 0, std::span<const std::int64_t> sizes = {},
                                   const CollectiveOptions& options = {});
  [[nodiscard]] std::optional<Tensor> gatherv(const TensorView& tensor, int root, int dim = 0,
                                              const CollectiveOptions& options = {});
  /// `rows`: how many rows of dimension 0 go to each rank, together all of this rank's. The result has the rows of all
  /// ranks in their order; `received`, if it is given, gets how many came from each.
  [[nodiscard]] Tensor all_to_allv(const TensorView& tensor, std::span<const std::int64_t> rows,
                                   std::vector<std::int64_t>* received = nullptr,
                                   const CollectiveOptions& options = {});

  // Configs: any values, with tensors in host memory or without. What is received is of this rank's own memory.

  /// Root's, on all ranks; what the others give is not looked at.
  [[nodiscard]] Config broadcast_config(const Config& config, int root, const CollectiveOptions& options = {});
  /// Each rank's, in the order of the ranks.
  [[nodiscard]] std::vector<Config> all_gather_config(const Config& config, const CollectiveOptions& options = {});
  /// The same on root; empty on the others.
  [[nodiscard]] std::vector<Config> gather_config(const Config& config, int root,
                                                  const CollectiveOptions& options = {});

  // Messages from one rank to another, by tag (0 or more): those of one tag come in the order that they were sent in.
  // `from` may be any_rank, `tag` of what is received any_tag. A receiver keeps some 256 KiB of each sender's messages
  // until it receives them. A longer message, or one beyond that, waits with its sender: send() returns when it is
  // received, and its deadline names the receiver. So two ranks that both send much first wait for each other; isend()
  // does not wait.

  /// Throws Error(argument) if `to` is this rank or none, or the tag is negative; as SyncGroup::send.
  void send(const TensorView& tensor, int to, int tag = 0, const CollectiveOptions& options = {});
  void send_config(const Config& config, int to, int tag = 0, const CollectiveOptions& options = {});
  /// Into `out`, contiguous and writable; returns its sender. Throws Error(rank_mismatch), and the group has not
  /// failed, if what has come is of another dtype or shape: it is gone then. A wait for any_rank ends if any rank dies
  /// or leaves.
  int recv(const Tensor& out, int from, int tag = 0, const CollectiveOptions& options = {});
  [[nodiscard]] Config recv_config(int from, int tag = 0, const CollectiveOptions& options = {});
  /// The same, with what it was.
  [[nodiscard]] ReceivedConfig recv_message(int from, int tag = any_tag, const CollectiveOptions& options = {});
  /// The oldest message that such a receive would get, if one has come. Never waits.
  [[nodiscard]] std::optional<MessageInfo> probe(int from, int tag = any_tag);

  // The same without waiting. A message that has begun moves while this rank waits for anything, in any group: for
  // messages, in collectives, in gathers and streams, or in Work::get() (MPI's progress rule). Work::get() waits for as
  // long as `options` say and throws as the calls above. A tensor is kept until it has been sent or received, a
  // borrowed one by the caller; a message that nobody waits for is lost if the group is destroyed before it has gone.

  [[nodiscard]] Work<void> isend(Tensor tensor, int to, int tag = 0, const CollectiveOptions& options = {});
  [[nodiscard]] Work<void> isend_config(const Config& config, int to, int tag = 0,
                                        const CollectiveOptions& options = {});
  [[nodiscard]] Work<int> irecv(const Tensor& out, int from, int tag = 0, const CollectiveOptions& options = {});
  [[nodiscard]] Work<ReceivedConfig> irecv_config(int from, int tag = 0, const CollectiveOptions& options = {});

  // Calls that run while the caller goes on.

  /// Collective. Runs call(group) on a thread of its own, on a duplicate of this group, while the caller goes on:
  /// `group.start([=](ProcessGroup& own) { own.all_reduce(gradient); })`. What is started runs in that order, one after
  /// another, as if this group's own calls were not there; all ranks start the same in the same order. The first one
  /// makes the duplicate. What the call reads and writes has to stay until the Work is done; what it returns is the
  /// Work's result. Its errors come out of Work::get(); what fails the duplicate fails this group, too. With MPI it
  /// needs MPI_THREAD_MULTIPLE. Destroying the group waits for what is under way.
  template <class Call>
  auto start(Call call) {
    auto task = detail::task_of<ProcessGroup>(std::move(call), [](ProcessGroup& own) { own.pass_on_failure(); });
    add_task(std::move(task.run));
    return std::move(task.work);
  }

 private:
  friend collectives::Engine& collectives::engine_of(ProcessGroup& group) noexcept;
  explicit ProcessGroup(std::shared_ptr<SyncGroup> group, const CollectiveOptions& options);
  void add_task(std::function<void(ProcessGroup&)> task);
  void pass_on_failure() noexcept;

  struct Async;
  std::shared_ptr<collectives::Engine> engine_;
  std::shared_ptr<Async> async_;  // where what is started runs
  std::weak_ptr<void> runs_in_;   // in a duplicate that does that: the thread's tasks
};

}  // namespace muster

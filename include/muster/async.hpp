// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers, merges and streams that run while the caller goes on: each gives a Work, to be asked and waited for.
// Semantics: the asynchronous calls of torch.distributed, which give a Work, and MPI's non-blocking collectives.

#include <chrono>
#include <future>
#include <optional>
#include <span>
#include <utility>

#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"

namespace muster {

namespace detail {
/// Throws Error(argument): the result has been taken, or there was never one.
[[noreturn]] void refuse_empty_work();
}  // namespace detail

/// An operation under way, and its result. Movable, not copyable; used by one thread at a time. One that is dropped
/// runs on to its end, because the other ranks need it; its result ends then.
template <class Result>
class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(std::future<Result> result) : result_(std::move(result)) {}

  /// Whether there is a result to take. False once it has been taken.
  [[nodiscard]] bool is_pending() const noexcept { return result_.valid(); }
  /// Whether the operation has ended, well or not: the caller's memory that it reads is the caller's again. Never
  /// waits.
  [[nodiscard]] bool is_done() const { return wait_for(std::chrono::milliseconds(0)); }
  /// Waits until it has ended, at most so long; false if it has not. The operation itself has a deadline of its own,
  /// and get() ends with that.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds time) const {
    if (!is_pending()) detail::refuse_empty_work();
    return result_.wait_for(time) == std::future_status::ready;
  }
  /// Waits until it has ended, and gives the result or throws what the call without `_async` would have thrown. Once.
  Result get() {
    if (!is_pending()) detail::refuse_empty_work();
    return result_.get();
  }

 private:
  std::future<Result> result_;
};

// The calls below do what those without `_async` do (gather.hpp, merge_gather.hpp, gather_each.hpp), on a thread of the
// group's own. Collective: all ranks call them, in the same order. Those of one group run one after another in that
// order; other calls of the same group may be made meanwhile, as if these were not there. The first one of a group
// makes a duplicate of it (two rounds), which they run on. They return at once after that.
//
// What they read has to stay as it is until the Work is done: tensors are kept by their owners where they have one
// (Tensor), a borrowed one by the caller. `ranks` and `options` are copied; options.stop cancels. Sources and consumers
// run on the group's thread.
//
// Errors come out of Work::get(). One that poisons the group poisons both it and the duplicate. Tensors on devices are
// refused with Error(unsupported), on all ranks: what is queued on the caller's stream is not known to another thread.
// With MPI they need MPI_THREAD_MULTIPLE (else Error(unsupported)). Destroying a group waits for what is under way.

Work<GatheredConfigs> get_configs_async(std::optional<Config> config, const RankList& ranks, SyncGroup& group,
                                        const GatherOptions& options = {});
Work<GatheredTensors> get_tensors_async(Tensor tensor, const RankList& ranks, SyncGroup& group,
                                        const GatherOptions& options = {});
Work<Merged> merge_tensor_async(Tensor tensor, const Merge& merge, const RankList& ranks, SyncGroup& group,
                                const GatherOptions& options = {});
Work<StreamReport> gather_each_async(LayerSource source, const RankList& ranks, SyncGroup& group, LayerConsumer consume,
                                     const StreamOptions& options = {});

}  // namespace muster

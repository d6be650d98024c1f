// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers, merges and streams that run while the caller continues. Each call returns a Work to poll or wait for.
// Semantics: the asynchronous calls of torch.distributed, which return a Work, and the non-blocking collectives of MPI.

#include <optional>

#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/work.hpp"

namespace muster {

// The calls below do the same as those without `_async` (gather.hpp, merge_gather.hpp, gather_each.hpp), on a thread
// that belongs to the group. Collective: all ranks make the same calls in the same order. The calls of one group run
// one after another in that order. Other calls of the same group may be made in the meantime and are independent. The
// first call for a group creates a duplicate of it (two rounds), on which they run. Apart from that, the calls return
// at once.
//
// Inputs must not change until the Work is done. A Tensor keeps its owner alive; the caller keeps borrowed memory
// alive. `ranks` and `options` are copied. A request of options.stop cancels the call. Sources and consumers run on the
// thread of the group.
//
// Errors are thrown by Work::get(). An error that aborts a group aborts both the group and the duplicate. Tensors on
// GPUs are rejected with Error(unsupported) on all ranks, because another thread does not know the work that is queued
// on the stream of the caller. With MPI the calls need MPI_THREAD_MULTIPLE, else they throw Error(unsupported).
// Destroying a group waits for its running calls.

/// Starts get_configs_parallel(). The rules above apply.
Work<GatheredConfigs> get_configs_async(std::optional<Config> config, const RankList& ranks, Group& group,
                                        const GatherOptions& options = {});
/// Starts get_tensors_parallel(). The rules above apply.
Work<GatheredTensors> get_tensors_async(Tensor tensor, const RankList& ranks, Group& group,
                                        const GatherOptions& options = {});
/// Starts merge_tensor_parallel(). The rules above apply.
Work<MergeResult> merge_tensor_async(Tensor tensor, const Merge& merge, const RankList& ranks, Group& group,
                                     const GatherOptions& options = {});
/// Starts gather_each(). The rules above apply.
Work<StreamReport> gather_each_async(LayerSource source, const RankList& ranks, Group& group, LayerConsumer consume,
                                     const StreamOptions& options = {});

}  // namespace muster

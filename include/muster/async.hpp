// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers, merges and streams that run while the caller goes on: each gives a Work, to be asked and waited for.
// Semantics: the asynchronous calls of torch.distributed, which give a Work, and MPI's non-blocking collectives.

#include <optional>

#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/work.hpp"

namespace muster {

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

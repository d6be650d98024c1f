// SPDX-License-Identifier: Apache-2.0
#pragma once
// What runs the asynchronous calls of a group: one thread, and a duplicate of the group that it alone uses.

#include <cstdint>
#include <span>

#include "muster/merge_gather.hpp"

namespace muster::gather {

/// Whether this thread is that of a group's asynchronous calls: what is queued on a caller's device stream is not known
/// to it, so its calls take tensors on the host alone.
bool is_asynchronous() noexcept;

/// The public calls, but that the first rank's own tensor in the result keeps its owner.
GatheredTensors get_tensors(const Tensor& tensor, const RankList& ranks, SyncGroup& group,
                            const GatherOptions& options);
Merged merge_tensor(const Tensor& tensor, const Merge& merge, const RankList& ranks, SyncGroup& group,
                    const GatherOptions& options);

/// Gives back what those that have ended keep for the next ones; nothing while one runs. Returns the bytes.
std::uint64_t trim_async(SyncGroup& group);

}  // namespace muster::gather

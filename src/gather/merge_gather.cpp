// SPDX-License-Identifier: Apache-2.0
// The public call of merge on gather; what happens in it is in merge_shm.cpp, merge_reduce.cpp and merge_unmoved.cpp.

#include "muster/merge_gather.hpp"

#include "src/gather/exchange.hpp"
#include "src/gather/opening.hpp"

namespace muster {

Merged merge_tensor_parallel(const TensorView& tensor, const Merge& merge, std::span<const int> ranks, SyncGroup& group,
                             const GatherOptions& options) {
  return gather::collectively(group, gather::Operation::merge, [&]() -> Merged {
    const Config value = Tensor::borrow(tensor);
    gather::Outcome outcome = gather::exchange(gather::Operation::merge, &value, ranks, group, options, &merge);
    std::optional<Tensor> merged;
    if (!outcome.entries.empty() && outcome.entries.front()) merged = outcome.entries.front()->as_tensor();
    return {std::move(outcome.list), std::move(merged), std::move(outcome.state)};
  });
}

Merged merge_tensor_parallel(const TensorView& tensor, const Merge& merge, std::span<const int> ranks) {
  return merge_tensor_parallel(tensor, merge, ranks, *world());
}

}  // namespace muster

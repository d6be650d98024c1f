// SPDX-License-Identifier: Apache-2.0
#pragma once
// Merge on gather: the tensors of all ranks of a list become one tensor on its first rank, while they travel. Every
// rank writes its part straight into the one result, so nobody gathers first and concatenates after. Semantics: what
// ModelOpt's exporters do to tensor-parallel weights and quantisation scales after they have gathered them
// (concatenation, and for scalar scales the maximum), and MPI_Reduce for max and sum. Roundings: merge.hpp.

#include <optional>

#include "muster/gather.hpp"
#include "muster/merge.hpp"

namespace muster {

/// The result of a merge: on the first rank of the list one tensor, elsewhere none. Movable, not copyable. Its end is
/// local, noexcept, on any thread. wait_released() is always true at once: the result holds nothing of other ranks.
class Merged : public Exchange {
 public:
  Merged() = default;
  Merged(std::vector<int> ranks, std::optional<Tensor> tensor, std::shared_ptr<detail::ExchangeState> state)
      : Exchange(std::move(ranks), std::move(state)), tensor_(std::move(tensor)) {}

  /// The merged tensor, contiguous (but for Own::borrow of a strided tensor where nothing moved) and read-only. Valid
  /// as long as the result or a copy of the tensor lives, whoever goes on, leaves or dies.
  [[nodiscard]] const std::optional<Tensor>& tensor() const noexcept { return tensor_; }
  /// Ends the result now: its memory returns to the pool for the next merge of this list, unless a copy of the tensor
  /// still lives.
  void release() noexcept { tensor_.reset(); }

 private:
  std::optional<Tensor> tensor_;
};

/// Collective over the group, one call by each rank, by the rules of get_tensors_parallel (gather.hpp): lists, disjoint
/// lists (which may merge differently) and ranks in none, errors and deadlines. Members of a list pass the same merge
/// and tensors that fit together: of one dtype and shape, but that for `concat` the sizes along its dimension may
/// differ (a negative dimension and the positive one are the same). `tensor` is read during the call only; it may be
/// strided, empty or, but for `concat`, a scalar.
///
/// The result lies in shared memory of the first rank, in a segment for this list that is kept for its next merge:
/// `memory_budget`, `pool_limit` and `pipeline_depth` of the first rank's options hold for it, and trim() gives it
/// back. `same`, `first` and a list of one rank move no bytes: there the result is the first rank's own tensor, as
/// GatherOptions::own says.
///
/// Throws on all ranks alike. Error(rank_mismatch) if merges, dtypes or shapes do not fit, with those of each rank,
/// or if tensors that are to be the "same" differ, with the ranks; Error(argument) if the dimension is not there
/// or the blocks do not divide it; Error(unsupported) if elements have no max or sum, or if packed elements
/// of two ranks would share a byte; Error(no_space) before any byte is copied; Error(no_space | io) if a rank is out
/// of memory or file descriptors. All these leave the group usable.
/// Error(timeout | peer_lost | cancelled) poison it.
Merged merge_tensor_parallel(const TensorView& tensor, const Merge& merge, const RankList& ranks, SyncGroup& group,
                             const GatherOptions& options = {});

/// The same over the world.
Merged merge_tensor_parallel(const TensorView& tensor, const Merge& merge, const RankList& ranks = all_ranks);

}  // namespace muster

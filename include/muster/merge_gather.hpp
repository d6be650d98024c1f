// SPDX-License-Identifier: Apache-2.0
#pragma once
// Merge during a gather: the tensors of all ranks of a list become one tensor on the root. Every rank writes its part
// directly into the result, so no rank holds the separate parts and the merged tensor at the same time. Semantics: the
// merges of ModelOpt's exporters for tensor-parallel weights and quantization scales (concatenation; the maximum for
// scalar scales), and MPI_Reduce for max and sum. muster/merge.hpp defines the rounding.

#include <optional>

#include "muster/gather.hpp"
#include "muster/merge.hpp"

namespace muster {

/// The result of a merge: one tensor on the root of the list, and no tensor on the other ranks. Movable, not copyable.
/// The destructor is local and noexcept and may run on any thread. wait_released() returns true at once, because the
/// result holds no memory of other ranks.
class MergeResult : public ExchangeResult {
 public:
  MergeResult() = default;
  /// Creates a result; only the library calls this.
  MergeResult(std::vector<int> ranks, std::optional<Tensor> tensor, std::shared_ptr<detail::ExchangeState> state)
      : ExchangeResult(std::move(ranks), std::move(state)), tensor_(std::move(tensor)) {}

  /// Returns the merged tensor, read-only; nullopt on ranks other than the root. It is contiguous, unless
  /// RootTensors::borrow returns the root's own strided tensor without a transfer. It is valid as long as the result or
  /// a copy of the tensor exists, even if other ranks leave or die.
  [[nodiscard]] const std::optional<Tensor>& tensor() const noexcept { return tensor_; }
  /// Releases the result now. Its memory returns to the pool for the next merge of this list, unless a copy of the
  /// tensor still exists.
  void release() noexcept { tensor_.reset(); }

 private:
  std::optional<Tensor> tensor_;
};

/// Merges the tensors of the members of a list into one tensor on the root, ranks[0]. Collective over the group: each
/// rank makes one call. The rules of get_tensors_parallel() (gather.hpp) for lists, errors and deadlines apply.
/// Disjoint lists may use different merges.
///
/// Members of a list pass the same merge and tensors of the same dtype and shape. Exception: for `concat`, the extents
/// along its dimension may differ. A negative dimension counts from the end and is equivalent to the positive one.
/// `tensor` is read during the call only. It may be strided, empty or, except for `concat`, a scalar.
///
/// The result is stored in shared memory of the root, in a segment that is kept for the next merge of this list. The
/// root's `memory_budget`, `pool_limit` and `pipeline_depth` apply to it, and trim() releases it. `same`, `first` and a
/// list of one rank transfer no bytes. Their result is the root's own tensor, as a view or a copy according to
/// GatherOptions::root_tensors.
///
/// Throws on all ranks alike:
/// - Error(rank_mismatch) if merges, dtypes or shapes do not match, with those of each rank, or if tensors of a `same`
///   merge differ, with the ranks;
/// - Error(invalid_argument) if the dimension does not exist or the blocks do not divide it;
/// - Error(unsupported) if the dtype has no max or sum, or if packed elements of two ranks would share a byte;
/// - Error(out_of_space) before any byte is copied;
/// - Error(out_of_space | io) if a rank runs out of memory or file descriptors.
///
/// The group remains usable after these errors. Error(timeout | peer_lost | cancelled) aborts it.
MergeResult merge_tensor_parallel(const TensorView& tensor, const Merge& merge, const RankList& ranks, Group& group,
                                  const GatherOptions& options = {});

/// Merges the tensors of all ranks of world(). Otherwise as the call above.
MergeResult merge_tensor_parallel(const TensorView& tensor, const Merge& merge, const RankList& ranks = all_ranks);

}  // namespace muster

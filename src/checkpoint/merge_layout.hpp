// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the parts of a tensor lie: a rule applied to shapes. The same pieces serve both ways, from the ranks to the
// whole and from the whole to the ranks. Nothing here touches elements.
//
// A new kind of rule adds an alternative to MergeAction, its two functions here and its reader in plan.cpp.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/plan.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// Elements [begin, begin + count) of a rank's tensor along the layout's dimension are [at, at + count) of the whole.
struct Piece {
  int rank = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t at = 0;
};

/// A whole tensor and the pieces that cover it.
struct MergedTensor {
  std::string name;
  TensorSpec whole;
  std::size_t dim = 0;
  std::vector<Piece> pieces;
  std::vector<int> must_equal;  ///< ranks whose tensors have to be the piece's, bit for bit
};

/// A whole tensor cut for N ranks. All ranks' tensors have one shape; what no piece covers is zero.
struct SplitTensor {
  TensorSpec shard;
  std::size_t dim = 0;
  std::vector<Piece> pieces;  ///< one a rank, in their order; count 0 where a rank has padding only
  bool padded = false;        ///< the whole's size along dim has to be remembered
};

/// What sharding padded: (dimension, size of the whole along it) by tensor name.
using PaddedSizes = std::map<std::string, std::pair<std::size_t, std::int64_t>, std::less<>>;

/// One tensor of one rank, as its file lists it.
struct NamedSpec {
  std::string name;
  TensorSpec spec;
};

/// Merges all tensors of all ranks; the result is in the order of their names. Throws Error(argument) that lists the
/// names without a rule (at most ten of them), or names two sources of one name, a dimension that a tensor has not, or
/// padding that contradicts the plan; Error(rank_mismatch) where a rank lacks a tensor, or dtypes or shapes do not fit.
std::vector<MergedTensor> merge_layout(const MergePlan& plan, std::span<const std::vector<NamedSpec>> ranks,
                                       const PaddedSizes& padded = {});

/// Cuts one tensor. Throws Error(argument) where no rule matches (for all names at once: check_rules), where the rule
/// has no way back, or where the dimension is not there.
SplitTensor split_layout(const MergePlan& plan, const NamedSpec& tensor, int ranks);

/// Throws Error(argument) that lists the names without a rule.
void check_rules(const MergePlan& plan, std::span<const NamedSpec> tensors);

}  // namespace muster

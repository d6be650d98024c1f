// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kinds of merge that combine the tensors of several ranks into one, for gathers (merge_gather.hpp) and merge plans
// (plan.hpp). Their names are those of tensor parallelism in Megatron and the exporters of ModelOpt.

#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace muster {

namespace merge {

/// Concatenates the tensors of the ranks along `dim`; a negative `dim` counts from the end. The dtype and the other
/// extents are equal. With `blocks`, the tensor is a fusion of several tensors (query, key, value; gate, up), each of
/// which is concatenated separately. `blocks` has their relative sizes along `dim` and is the same on every rank.
struct Concat {
  /// The dimension along which the tensors are joined.
  std::int64_t dim = 0;
  /// The relative sizes of the fused tensors. Empty: the tensor is not a fusion.
  std::vector<std::int64_t> blocks = {};
  friend bool operator==(const Concat&, const Concat&) = default;
};
/// Requires that every rank has the same tensor; all are compared bit by bit.
struct Same {
  friend bool operator==(const Same&, const Same&) = default;
};
/// Takes the tensor of the root and ignores those of the other ranks.
struct First {
  friend bool operator==(const First&, const First&) = default;
};
/// Takes the largest value of each element. NaN in any rank gives NaN. Supports real numbers only: bool, integers,
/// floats.
struct Max {
  friend bool operator==(const Max&, const Max&) = default;
};
/// Adds each element in rank order. Floats narrower than 32 bits are added in f32 and rounded once, to nearest even.
/// f32 is added in f32, and f64 in f64. Integers wrap around; bool is rejected.
struct Sum {
  friend bool operator==(const Sum&, const Sum&) = default;
};
/// Stacks the tensors of the ranks, of one dtype and shape, along a new outermost dimension.
struct Stack {
  friend bool operator==(const Stack&, const Stack&) = default;
};

}  // namespace merge

/// One of the merges.
using Merge = std::variant<merge::Concat, merge::Same, merge::First, merge::Max, merge::Sum, merge::Stack>;

namespace merge {

/// Returns a merge that concatenates along `dim`.
inline Merge concat(std::int64_t dim) {
  return Concat{dim, {}};
}
/// Returns a merge that concatenates the parts of fused tensors along `dim` (Concat::blocks).
inline Merge concat_blocks(std::int64_t dim, std::vector<std::int64_t> blocks) {
  return Concat{dim, std::move(blocks)};
}
/// Returns a Same merge.
inline Merge same() {
  return Same{};
}
/// Returns a First merge.
inline Merge first() {
  return First{};
}
/// Returns a Max merge.
inline Merge max() {
  return Max{};
}
/// Returns a Sum merge.
inline Merge sum() {
  return Sum{};
}
/// Returns a Stack merge.
inline Merge stack() {
  return Stack{};
}

}  // namespace merge

/// Returns "concat", "same", "first", "max", "sum" or "stack".
std::string_view merge_name(const Merge& merge) noexcept;

}  // namespace muster

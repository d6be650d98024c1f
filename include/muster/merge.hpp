// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the tensors of several ranks become one: the kinds of merge that a gather (merge_gather.hpp) and a merge plan
// (plan.hpp) know. The names are those of tensor parallelism as Megatron and ModelOpt's exporters use them.

#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace muster {

namespace merge {

/// The ranks' tensors one after the other along `dim` (negative: counted from the last); other sizes and dtypes are
/// equal. With `blocks` the tensor is several fused ones (query, key, value; gate, up), each of them concatenated by
/// itself: the numbers are the blocks' relative sizes along dim, the same on every rank.
struct Concat {
  std::int64_t dim = 0;
  std::vector<std::int64_t> blocks = {};
  friend bool operator==(const Concat&, const Concat&) = default;
};
/// Every rank has the whole tensor; all are compared, bit for bit.
struct Same {
  friend bool operator==(const Same&, const Same&) = default;
};
/// The first rank's tensor, whatever the others have.
struct First {
  friend bool operator==(const First&, const First&) = default;
};
/// The largest value of each element. NaN in any rank gives NaN. Real numbers only: bool, integers, floats.
struct Max {
  friend bool operator==(const Max&, const Max&) = default;
};
/// The sum of each element in rank order. Floats narrower than 32 bits are added in f32 and rounded once, to nearest
/// even; f32 in f32, f64 in f64. Integers wrap around; bool is refused.
struct Sum {
  friend bool operator==(const Sum&, const Sum&) = default;
};
/// The ranks' tensors, of one dtype and shape, along a new outermost dimension.
struct Stack {
  friend bool operator==(const Stack&, const Stack&) = default;
};

}  // namespace merge

using Merge = std::variant<merge::Concat, merge::Same, merge::First, merge::Max, merge::Sum, merge::Stack>;

namespace merge {

inline Merge concat(std::int64_t dim) {
  return Concat{dim, {}};
}
inline Merge concat_blocks(std::int64_t dim, std::vector<std::int64_t> blocks) {
  return Concat{dim, std::move(blocks)};
}
inline Merge same() {
  return Same{};
}
inline Merge first() {
  return First{};
}
inline Merge max() {
  return Max{};
}
inline Merge sum() {
  return Sum{};
}
inline Merge stack() {
  return Stack{};
}

}  // namespace merge

/// "concat", "same", "first", "max", "sum", "stack".
std::string_view merge_name(const Merge& merge) noexcept;

}  // namespace muster

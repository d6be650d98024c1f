// SPDX-License-Identifier: Apache-2.0
#pragma once
// max, min, sum, product and average of elements, for every dtype that has them. How each is rounded is in merge.hpp;
// beyond that:
// - max and min: NaN of any source gives NaN; zeros of either sign are equal, and the first source's stays. bool: or
//   and and.
// - sum and product of f16, bf16 and f8_e5m2: what is too large becomes infinity, as IEEE 754 has it. f8_e4m3fn has no
//   infinity: what is rounded past 448 becomes NaN (as in PyTorch and in the OCP standard's non-saturating mode).
// - average: the sum by the number of sources, rounded once; of floats alone. product of bool: and.
// - a NaN that comes of a sum, a product or an average, or of a max or min of floats narrower than 32 bits, is the
//   format's quiet one. What the NaN of a source carried is not kept, so that the bits depend on nothing but the
//   values.

#include <cstddef>
#include <functional>
#include <span>

#include "muster/dtype.hpp"
#include "muster/merge.hpp"
#include "muster/tensor.hpp"
#include "src/merge/layout.hpp"

namespace muster::merge {

/// "max", "sum": for messages.
const char* name_of(Combine combine) noexcept;

/// Throws Error(unsupported) that names dtype and operation if there is no such thing.
void check_reducible(Combine combine, DType dtype);

/// target[i] = sources[0][i] op sources[1][i] ... in that order; all have target.size() bytes, which hold whole
/// elements; there is at least one. The target may be a source's own memory, else they must not overlap. Nothing need
/// be aligned. Local, any thread. Throws as check_reducible.
void reduce(Combine combine, DType dtype, std::span<std::byte> target, std::span<const std::byte* const> sources);

/// Bytes [begin, end) of a tensor as they lie without gaps, at whole elements: where they are, or, of a strided one,
/// copied to `staging`, which has room for them.
const std::byte* gapless(const TensorView& tensor, std::uint64_t begin, std::uint64_t end, std::byte* staging);

// A merge whose sources are all in this process's memory.

/// The merged tensor in fresh memory, by several threads; `progress` is called now and then, on any of them. `ranks`
/// are what messages call the sources. Throws as join, rows_of and check_reducible.
Tensor merge_in_memory(const Merge& merge, std::span<const TensorView> sources, std::span<const int> ranks,
                       const std::function<void()>& progress);

}  // namespace muster::merge

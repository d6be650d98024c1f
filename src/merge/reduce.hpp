// SPDX-License-Identifier: Apache-2.0
#pragma once
// max, min, sum, product and average of elements, for every dtype that supports them. merge.hpp describes the rounding.
// In addition:
// - Max and min: a NaN in any source gives NaN. Zeros of either sign are equal, and the zero of the first source is
//   kept. For bool they are a logical or and a logical and.
// - Product of bool: a logical and.
// - Sum and product of f16, bf16 and f8_e5m2: values that are too large become infinity, as in IEEE 754. f8_e4m3fn has
//   no infinity: values that round to more than 448 become NaN (as in PyTorch and in the OCP standard's non-saturating
//   mode).
// - Average: the sum divided by the number of sources, rounded once; only for floats.
// - NaN results: a sum, a product, an average, and a max or min of floats narrower than 32 bits return the quiet NaN of
//   the format. The payload of a source's NaN is not kept, so that the resulting bits depend only on the values.

#include <cstddef>
#include <functional>
#include <span>

#include "muster/dtype.hpp"
#include "muster/merge.hpp"
#include "muster/tensor.hpp"
#include "src/merge/layout.hpp"

namespace muster::merge {

/// Returns the name for messages, such as "max" or "sum".
const char* name_of(Combine combine) noexcept;

/// Throws Error(unsupported) with dtype and operation if the dtype does not support the operation.
void check_reducible(Combine combine, DType dtype);

/// Computes target[i] = sources[0][i] op sources[1][i] ... in that order. There must be at least one source. All have
/// target.size() bytes, which hold whole elements. The target may be the memory of a source; otherwise they must not
/// overlap. The memory need not be aligned. Local, any thread. Throws as check_reducible.
void reduce(Combine combine, DType dtype, std::span<std::byte> target, std::span<const std::byte* const> sources);

/// Returns bytes [begin, end) of a tensor in contiguous order; the range must consist of whole elements. For a
/// contiguous tensor the result points into it. A strided tensor is copied to `staging`, which must have room for the
/// range.
const std::byte* gapless(const TensorView& tensor, std::uint64_t begin, std::uint64_t end, std::byte* staging);

// A merge whose sources are all in the memory of this process.

/// Returns the merged tensor in fresh memory. Several threads compute it, and any of them calls `progress` from time to
/// time. `ranks`: the numbers of the sources in messages. Throws as join, rows_of and check_reducible.
Tensor merge_in_memory(const Merge& merge, std::span<const TensorView> sources, std::span<const int> ranks,
                       const std::function<void()>& progress);

}  // namespace muster::merge

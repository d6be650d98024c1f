// SPDX-License-Identifier: Apache-2.0
#pragma once
// max and sum of elements, for every dtype that has them (merge.hpp says how each is rounded).

#include <cstddef>
#include <span>

#include "muster/dtype.hpp"
#include "src/merge/layout.hpp"

namespace muster::merge {

/// Throws Error(unsupported) that names dtype and operation where there is no such thing.
void check_reducible(Combine combine, DType dtype);

/// target[i] = sources[0][i] op sources[1][i] ... in that order; all have target.size() bytes, which hold whole
/// elements. The target may be sources[0]'s own memory, else they must not overlap. Nothing need be aligned.
void reduce(Combine combine, DType dtype, std::span<std::byte> target, std::span<const std::byte* const> sources);

}  // namespace muster::merge

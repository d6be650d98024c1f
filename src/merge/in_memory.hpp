// SPDX-License-Identifier: Apache-2.0
#pragma once
// A merge whose sources are all in this process's memory.

#include <functional>
#include <span>

#include "muster/merge.hpp"
#include "muster/tensor.hpp"

namespace muster::merge {

/// The merged tensor in fresh memory, by several threads; `progress` is called now and then, on any of them. `ranks`
/// are what messages call the sources. Throws as join, rows_of and check_reducible.
Tensor merge_in_memory(const Merge& merge, std::span<const TensorView> sources, std::span<const int> ranks,
                       const std::function<void()>& progress);

}  // namespace muster::merge

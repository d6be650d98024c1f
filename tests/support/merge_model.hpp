// SPDX-License-Identifier: Apache-2.0
#pragma once
// A simple model of merging, in one process: what tests hold merges over any route against.

#include <vector>

#include "muster/merge.hpp"
#include "muster/tensor.hpp"

namespace muster::test {

/// What `merge` makes of the sources, which are contiguous and fit together.
Tensor merge_model(const Merge& merge, const std::vector<Tensor>& sources);

}  // namespace muster::test

// SPDX-License-Identifier: Apache-2.0
#pragma once
// A simple model of merging in one process, with which tests compare merges over all routes.

#include <vector>

#include "muster/merge.hpp"
#include "muster/tensor.hpp"

namespace muster::test {

/// Returns the result of `merge` for the sources, which are contiguous and have matching shapes.
Tensor merge_model(const Merge& merge, const std::vector<Tensor>& sources);

}  // namespace muster::test

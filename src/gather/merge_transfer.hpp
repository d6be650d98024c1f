// SPDX-License-Identifier: Apache-2.0
#pragma once
// The transfers of merges: what an exchange does when its tensors become one.

#include <memory>

#include "src/gather/route.hpp"

namespace muster::gather {

/// Where nothing moves: one rank, or a merge that takes the first rank's tensor as it is.
std::unique_ptr<Transfer> make_unmoved_merge(const Call& call);

/// Over shared memory (merge_shm.cpp), or unmoved where the merge needs no more.
std::unique_ptr<Transfer> make_shm_merge(const Call& call);

}  // namespace muster::gather

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts of one source's tensors that several processes want: on each host every byte is read once.
//
// The source's tensors are cut into blocks. All processes of a host know who wants what of each block, and go through
// them in one order:
//
//  1. A block that one process wants is read by that one, to its places.
//  2. One that several want is read by one of them, by turns, into a window of its shared memory; it raises its ring's
//     stage then.
//  3. Each of them, the reader too, waits for the stage, copies what it wants, and arrives.
//  4. The reader releases a window when all have arrived, and reads a later block into it. It reads ahead as far as its
//     windows have been used by itself.
//
// Nobody waits in a circle: take a process that is farthest behind. The reader of the block that it waits for is there
// or farther, and waits at most for a window of an earlier block, which all have used.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/checkpoint/tensor_source.hpp"
#include "src/core/parallel.hpp"
#include "src/merge/view.hpp"
#include "src/sync/group.hpp"

namespace muster {

/// Where the bytes of a merged tensor go.
struct ReadTarget {
  std::byte* begin = nullptr;
  std::uint64_t item = 1;         ///< bytes of an element
  std::vector<merge::Box> boxes;  ///< from `begin` on to the merged tensor; empty: as they are
};

/// Collective over `group`, which is poisoned by whoever fails: make one for it. `wanted`: of each rank of this host,
/// copies of `source`'s tensors, the same on all of them; of other ranks nothing. `targets`: of this rank's, with zeros
/// where nothing is copied. Throws the first failure of any rank.
void read_shared(sync::Group& group, const TensorSource& source,
                 std::span<const std::vector<const MergedTensor*>> wanted, std::span<const ReadTarget> targets,
                 ProgressCounter& progress);

}  // namespace muster

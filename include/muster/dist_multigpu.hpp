// SPDX-License-Identifier: Apache-2.0
#pragma once
// muster::dist with several devices in each process. Semantics: the *_multigpu functions of torch.distributed in
// PyTorch 0.4. Programs that include this header link libmuster-cuda (pkg-config muster-cuda).
//
// Each rank gives one tensor for each of its devices, the same number on all ranks, all of one dtype and shape. NCCL
// sees all devices of all ranks: those of rank 0 first, in the order of the list. Ranks are those of the job. Tensors
// are contiguous, and written to where they are results. A call is put into the stream that is named, on the device of
// that stream, and into the default streams of the others; it cannot be captured into a graph. What else:
// muster/dist.hpp, and docs/devices.md, "Collectives".

#include <span>
#include <vector>

#include "muster/cuda.hpp"
#include "muster/dist.hpp"

namespace muster::dist {

/// The first tensor of src comes into all tensors of all ranks, src's own others among them.
void broadcast_multigpu(std::span<const Tensor> tensors, int src, const Group& group = world_group);
/// In place: all tensors of all ranks, reduced, in each of them.
void all_reduce_multigpu(std::span<const Tensor> tensors, ReduceOp op = ReduceOp::sum,
                         const Group& group = world_group);
/// The result is in the first tensor of dst; all others stay as they are.
void reduce_multigpu(std::span<const Tensor> tensors, int dst, ReduceOp op = ReduceOp::sum,
                     const Group& group = world_group);
/// tensors[j] of the group's rank k comes into outputs[i][k * tensors.size() + j] for each i: outputs[i] is on the
/// device of tensors[i].
void all_gather_multigpu(std::span<const std::vector<Tensor>> outputs, std::span<const Tensor> tensors,
                         const Group& group = world_group);

}  // namespace muster::dist

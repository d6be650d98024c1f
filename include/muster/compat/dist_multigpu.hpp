// SPDX-License-Identifier: Apache-2.0
#pragma once
// muster::dist for processes with several GPUs each. Programs that include this header link libmuster-cuda (pkg-config
// muster-cuda). Semantics: the *_multigpu functions of torch.distributed in PyTorch 0.4.
//
// Each rank passes one tensor per GPU. The number of tensors, the dtype and the shape are the same on all ranks. NCCL
// uses all GPUs of all ranks: first those of rank 0, in the order of its tensors. `src` and `dst` are ranks of the job.
// Tensors are contiguous; tensors that receive results are writable. On the GPU of the stream of this thread
// (CudaStreamScope) a call is queued in that stream. On the other GPUs it is queued in their default streams. It cannot
// be captured into a graph. Other rules: muster/compat/dist.hpp, and docs/reference/gpu.md, "Collectives".

#include <span>
#include <vector>

#include "muster/compat/dist.hpp"
#include "muster/cuda.hpp"

namespace muster::dist {

/// Copies the first tensor of `src` into all tensors of all ranks, including the other tensors of `src`. Collective.
void broadcast_multigpu(std::span<const Tensor> tensors, int src, const Group& group = world_group);
/// Reduces all tensors of all ranks, and writes the result into each of them. Collective.
void all_reduce_multigpu(std::span<const Tensor> tensors, ReduceOp op = ReduceOp::sum,
                         const Group& group = world_group);
/// Reduces all tensors of all ranks into the first tensor of `dst`. All other tensors are not changed. Collective.
void reduce_multigpu(std::span<const Tensor> tensors, int dst, ReduceOp op = ReduceOp::sum,
                     const Group& group = world_group);
/// Copies tensors[j] of rank k of the group into outputs[i][k * tensors.size() + j] for each i. outputs[i] is on the
/// GPU of tensors[i]. Collective.
void all_gather_multigpu(std::span<const std::vector<Tensor>> outputs, std::span<const Tensor> tensors,
                         const Group& group = world_group);

}  // namespace muster::dist

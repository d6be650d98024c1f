// SPDX-License-Identifier: Apache-2.0
#pragma once
// Live exports: the ranks of a group write the tensors in their memory as one checkpoint in the Hugging Face layout. No
// shard is written first, and no rank holds the model. The file export (export.hpp) has the same name, order of
// arguments, options and report.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/group.hpp"
#include "muster/tensor.hpp"
#include "muster/work.hpp"

namespace muster {

/// A tensor of this rank, or a part of one: a box of its elements. A rank may pass several parts of one tensor.
struct TensorPart {
  std::string name;   ///< the name in the checkpoint; with a plan, the name on this rank
  Tensor tensor;      ///< may be strided
  Shape whole = {};   ///< shape of the whole tensor; if empty, this part is the whole tensor
  Shape offset = {};  ///< position of the first element of the part in the whole tensor; if empty, zero
};

/// Returns the parts that this rank has of the next unit (often a layer), or nullopt after the last unit. The list may
/// be empty. At the next call, the parts belong to the caller again.
using PartSource = std::function<std::optional<std::vector<TensorPart>>()>;

// The calls below are collective over `group`. Every rank passes its parts; a rank without parts passes an empty list.
// Only rank 0 uses `out`, `plan` and the options, except for ExportOptions::stop. Tensors must not change during a
// call.
//
// By boxes (`plan` empty): names are those of the checkpoint. The parts of all ranks must cover every element of each
// tensor. Parts may overlap if their common elements are equal bit by bit (replicas).
//
// By plan: names are those that the plan expects on ranks, and `whole` and `offset` of all parts are empty. Rank r of
// the group is rank r of ExportOptions::source_layout; without a layout, tensor parallelism is assumed.
//
// With Writers::rank0, the lowest rank that has a replica provides its bytes. With Writers::all, the rank that has the
// least to write provides them. The other ranks only hash their replicas, before anything is written.
//
// These options are errors here: `resume`, `target_layout`, `to_plan`, `job_id`, `step`, `key` and `file_pattern`.
// `source_layout` needs a plan.
//
// Each failure is one error that all ranks throw. It names the tensor and the ranks, and no output remains. The group
// stays usable after Error(invalid_argument | rank_mismatch | not_found | io | out_of_space | unsupported). Such errors
// are: replicas that differ (rank_mismatch), elements that no part covers (invalid_argument), a tensor with two shapes
// or dtypes (rank_mismatch), a part outside its tensor (invalid_argument), and an `out` that exists
// (invalid_argument). Error(timeout | peer_lost | cancelled) aborts the group.

/// Exports the parts and returns when the checkpoint is complete. Memory: ExportOptions::memory_budget for all ranks
/// together.
ExportReport export_model(std::span<const TensorPart> parts, const std::string& out, const std::string& plan,
                          Group& group, const ExportOptions& options = {});

/// Exports unit by unit, so that the model never needs to be in memory as a whole. `next` is called on this thread. All
/// parts of a tensor belong to the same unit, and all ranks return the same number of units; otherwise all ranks throw
/// Error(rank_mismatch). An exception of `next` becomes one error on all ranks. `plan` must be empty, else all ranks
/// throw Error(unsupported).
///
/// The files grow with each unit, and get their headers and numbers at the end. Each header has 1 MiB, which is padded
/// with spaces. Three options differ: `dtype` needs `cast_all`, because the other tensors of the model are not known
/// yet; a head that config.json ties to the embeddings is not left out; the progress counts the bytes of the units that
/// have come so far. The model is compared with `base_model` after the last unit.
ExportReport export_model(const PartSource& next, const std::string& out, const std::string& plan, Group& group,
                          const ExportOptions& options = {});

/// Starts an export and returns once everything that this rank contributes is copied. After that the tensors may be
/// changed and freed. The call itself makes all checks and compares replicas, and throws their errors. A thread and a
/// duplicate of the group, for exports alone, then write the files; other asynchronous calls do not wait for them.
///
/// The copy is in memory of this process that the group keeps for later exports; trim() releases it. If the memory is
/// not available, all ranks throw Error(out_of_space) before anything is copied. If an earlier export of the group is
/// still running, the call waits for its end first, so exports end in order.
///
/// Work::get() returns the report, or throws the same error on all ranks. An error that nobody has taken when the Work
/// is destroyed is logged. After Error(timeout | peer_lost) the group has failed as well. A stop request cancels the
/// export and leaves the group usable, once this call has returned. Destroying the group waits for the export.
///
/// Tensors on a GPU are copied on the stream that Muster uses for the caller, and the call waits for the copies. With
/// MPI the call needs MPI_THREAD_MULTIPLE, else it throws Error(unsupported).
Work<ExportReport> export_model_async(std::span<const TensorPart> parts, const std::string& out,
                                      const std::string& plan, Group& group, const ExportOptions& options = {});

}  // namespace muster

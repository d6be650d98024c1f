// SPDX-License-Identifier: Apache-2.0
#pragma once
// Live exports: the ranks of a group write the tensors in their memory as one checkpoint in the Hugging Face layout. No
// shard is written first, and no rank holds the whole model. The export of files (export.hpp) has the same name, order
// of arguments, options and report.

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

/// Returns the parts that this rank has of the next unit, or nullopt after the last unit. A unit is often a layer. The
/// list may be empty. At the next call, the export no longer uses the parts of the last call, so they may be freed.
using PartSource = std::function<std::optional<std::vector<TensorPart>>()>;

// The calls below are collective over `group`. Every rank passes its parts; a rank without parts passes an empty list.
// Only rank 0 uses `out`, `plan` and the options, except for ExportOptions::stop. Tensors must not change during a
// call.
//
// Export by boxes (`plan` is empty): TensorPart::name is the name in the checkpoint. A part is a box of the elements of
// its tensor. The parts of all ranks must cover every element of each tensor. Parts may overlap if their common
// elements are equal bit by bit (replicas).
//
// Export by plan: TensorPart::name is the name that the plan expects on a rank, and `whole` and `offset` of all parts
// must be empty. Rank r of the group is rank r of ExportOptions::source_layout. If the layout is unset, tensor
// parallelism over all ranks is assumed.
//
// If several ranks have the same elements, one of them provides the bytes. With Writers::rank0 it is the lowest of
// these ranks, and with Writers::all the one that has the least to write. The other ranks compute hashes of these
// elements, unless `check_replicas` is off. The hashes are compared before anything is written, or, unit by unit,
// before the unit is written.
//
// These options are errors in the calls below: `resume`, `target_layout`, `to_plan`, `job_id`, `step`, `key` and
// `file_pattern`. `source_layout` needs a plan.
//
// Each failure is one error that all ranks throw. It names the tensor and the ranks, and no output remains. The group
// stays usable after Error(invalid_argument | rank_mismatch | not_found | io | out_of_space | unsupported). Such errors
// are: replicas that differ (rank_mismatch), elements that no part covers (invalid_argument), a tensor with two shapes
// or dtypes (rank_mismatch), a part outside its tensor (invalid_argument), and an `out` that exists
// (invalid_argument). Error(timeout | peer_lost | cancelled) aborts the group.

/// Exports the parts and returns when the checkpoint is complete. The buffers of all ranks together need at most
/// ExportOptions::memory_budget.
ExportReport export_model(std::span<const TensorPart> parts, const std::string& out, const std::string& plan,
                          Group& group, const ExportOptions& options = {});

/// Exports unit by unit, so that the model never needs to be in memory as a whole. `next` is called on this thread. All
/// parts of a tensor must belong to the same unit. All ranks must return the same number of units, else all ranks throw
/// Error(rank_mismatch). If `next` throws on one rank, all ranks throw one error.
///
/// The files grow with each unit. After the last unit, they get their headers and the numbers in their names. Each
/// header occupies 1 MiB and is padded with spaces; a new file begins if a header might need more. The following rules
/// differ from the call above:
/// - `dtype` needs `cast_all`, because the other tensors of the model are not known yet.
/// - An output head that config.json ties to the embeddings is not left out.
/// - The progress counts only the bytes of the units that `next` has returned so far.
/// - The model is compared with `base_model` after the last unit.
/// - With a plan, the numbers of layers in the names must be those of the model on every pipeline stage. All experts of
///   a layer, a weight and its scales, and tensors that the plan ties must be in one unit. If the plan needs the number
///   of heads, config.json (of `base_model` or `files`) must state it.
ExportReport export_model(const PartSource& next, const std::string& out, const std::string& plan, Group& group,
                          const ExportOptions& options = {});

/// Starts an export, copies the elements that this rank contributes, and returns. After that, the caller may change and
/// free the tensors. Before it copies, the call makes all checks and compares replicas, and throws the errors of these
/// steps. A separate thread then writes the files over a duplicate of the group. Other asynchronous calls use neither
/// of them, so they do not wait for an export.
///
/// The group keeps the memory of the copy for later exports; trim() releases it. If the memory is not available, all
/// ranks throw Error(out_of_space) before anything is copied. If an earlier export of the group is still running, the
/// call waits for its end first, so exports end in order.
///
/// Work::get() returns the report, or throws the same error on all ranks. If the Work is destroyed without get(), an
/// error of the export is logged. Error(timeout | peer_lost) also aborts the group of the caller. A stop request during
/// this call aborts the group. A stop request after this call has returned cancels only the export, and the group
/// remains usable. Destroying the group waits for the export.
///
/// Tensors on a GPU are copied on the stream that Muster uses for the caller, and the call waits for the copies. In
/// groups over MPI, the call needs MPI_THREAD_MULTIPLE, else it throws Error(unsupported).
Work<ExportReport> export_model_async(std::span<const TensorPart> parts, const std::string& out,
                                      const std::string& plan, Group& group, const ExportOptions& options = {});

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a path holds, told by what is there and not by its name: a model's files, a state file, any other HDF5 file, the
// states of a workspace, or the shards of ranks, merged while they are read.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/request.hpp"
#include "src/checkpoint/tensor_source.hpp"

namespace muster::inspect {

/// A file that a source reads.
struct SourceFile {
  std::string path;
  std::uint64_t bytes = 0;    ///< of its tensors
  std::uint64_t tensors = 0;  ///< in it
};

/// Something that may be wrong, or that is not shown.
struct SourceIssue {
  std::string kind;         ///< a word that a program can branch on
  std::string tensor = {};  ///< empty: the whole
  std::string words = {};
};

/// A path that was opened: its tensors, and what stands beside them.
struct Source {
  std::string path;
  std::string_view kind = {};  ///< safetensors, model, shards, state, workspace, hdf5 or foreign::Kind
  std::shared_ptr<const TensorSource> tensors = {};
  std::map<std::string, std::string> metadata = {};        ///< of the headers
  std::vector<SourceFile> files = {};                      ///< none of shards and of HDF5 files of others
  std::vector<StateFile> states = {};                      ///< of a state file or a workspace that is not merged
  std::vector<std::pair<std::string, Config>> facts = {};  ///< whose state it is and the like, as people want it
  std::vector<SourceIssue> issues = {};                    ///< what the reader found

  [[nodiscard]] const std::vector<TensorEntry>& entries() const noexcept { return tensors->tensors(); }
  /// The config beside the tensors; of the states of ranks an object: {"rank0": ..., "rank1": ...}. Throws
  /// Error(corrupt | io).
  [[nodiscard]] std::optional<Config> config() const;
};

/// How a path is read; its own path is the one that is given beside it.
using SourceOptions = Request;

/// A safetensors file, a state file, any other HDF5 file, a directory in HuggingFace's layout, one with the shards of
/// all ranks, which the plan merges, a foreign checkpoint (of ranks: likewise), or a workspace. Of a workspace: the
/// newest complete state of each rank of a job; with a plan merged like shards, else each tensor as "rank2/NAME",
/// unless there is one rank or one is asked for. Throws as ModelDir::open, StateFile::open, ForeignHdf5::open,
/// workspace::survey and MergePlan::load; Error(argument) if shards have no plan, a tensor has no rule in it, or
/// several jobs could be meant; Error(not_found) if there is no such job, rank or generation.
Source open_source(const std::string& path, const SourceOptions& options = {});

/// "2 items are not shown: ...", a line with its end, for the end of a listing; empty if the reader has taken
/// everything. Attributes and links that are not shown are no part of a listing.
std::string omissions_line(const Source& source);

/// Tensors whose names match (TensorPattern::glob), in their order; all if the pattern is empty. Throws
/// Error(argument) on a pattern that is none, Error(not_found) if no name matches, with names that are near.
std::vector<std::size_t> matching(const Source& source, const std::string& pattern);

/// The place of a name in the entries. Throws Error(not_found) with names that are near.
std::size_t find_tensor(const Source& source, std::string_view name);

}  // namespace muster::inspect

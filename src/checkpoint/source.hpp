// SPDX-License-Identifier: Apache-2.0
#pragma once
// The contents of a path, recognised by the files and not by their names. They are a model's files, a state file, any
// other HDF5 file, the states of a workspace, or the shards of ranks. Shards are merged while they are read.

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
#include "src/checkpoint/assembly/request.hpp"
#include "src/checkpoint/model/tensor_source.hpp"

namespace muster {

/// A file that a source reads.
struct SourceFile {
  std::string path;
  std::uint64_t bytes = 0;    ///< of its tensors
  std::uint64_t tensors = 0;  ///< number of tensors in it
};

/// A possible defect, or data that is not shown.
struct SourceIssue {
  std::string kind;         ///< a keyword on which a program can branch
  std::string tensor = {};  ///< empty: the whole source
  std::string message = {};
};

/// A path that was opened: its tensors, and its other data.
struct Source {
  std::string path;
  std::string_view kind = {};  ///< safetensors, model, shards, state, workspace, hdf5 or thirdparty::Kind
  std::shared_ptr<const TensorSource> tensors = {};
  std::map<std::string, std::string> metadata = {};  ///< from the headers
  std::vector<SourceFile> files = {};                ///< empty for shards and for HDF5 files that Muster did not write
  std::vector<StateFile> states = {};                ///< only for a state file, or a workspace that is not merged
  std::vector<std::pair<std::string, Config>> facts = {};  ///< the rank of a state and similar facts, in readable form
  std::vector<SourceIssue> issues = {};                    ///< found by the reader

  [[nodiscard]] const std::vector<TensorEntry>& entries() const noexcept { return tensors->tensors(); }
  /// Returns the config of the source. For the states of ranks it is an object: {"rank0": ..., "rank1": ...}. Throws
  /// Error(corrupt | io).
  [[nodiscard]] std::optional<Config> config() const;
};

/// Options for reading a path. Its own `path` member is ignored: the path is a separate argument.
using SourceOptions = Request;

/// Opens a safetensors file, a state file, any other HDF5 file, a directory in Hugging Face's layout, a directory with
/// the shards of all ranks, a third-party checkpoint, or a workspace. The plan merges shards, and the ranks of a
/// third-party checkpoint. For a workspace, the newest complete state of each rank of a job is used. With a plan they
/// are merged like shards. Otherwise each tensor is named "rank2/NAME", unless there is only one rank or one is
/// requested. `dtype` casts as in an export; state files and other HDF5 files are then refused. Throws as
/// ModelDir::open, StateFile::open, ForeignHdf5::open, workspace::survey and MergePlan::load; Error(invalid_argument)
/// if shards have no plan, the plan has no rule for a tensor, or several jobs match; Error(not_found) if the path, job,
/// rank or step does not exist.
Source open_source(const std::string& path, const SourceOptions& options = {});

/// Returns the last line of a listing, "2 items are not shown: ..."; empty if the reader left out nothing. Attributes
/// and links that are not shown do not count.
std::string omissions_line(const Source& source);

/// Selects tensors.
struct TensorFilter {
  std::string select = {};         ///< a glob (TensorPattern::glob) that names must match; empty: all
  std::string exclude = {};        ///< a glob that names must not match
  std::vector<DType> dtypes = {};  ///< empty: all
  std::uint64_t larger_than = 0;   ///< in bytes; 0: tensors without elements, too

  /// Whether it selects all tensors.
  [[nodiscard]] bool is_all() const noexcept {
    return select.empty() && exclude.empty() && dtypes.empty() && larger_than == 0;
  }
};

/// Returns whether the filter selects a tensor with this dtype and size, whatever its name is.
bool has_selected_type(const TensorFilter& filter, DType dtype, std::uint64_t bytes) noexcept;

/// Returns the indices of the selected tensors, in their order. Throws Error(invalid_argument) on an invalid glob, and
/// Error(not_found) with similar names if no name matches.
std::vector<std::size_t> matching(const Source& source, const TensorFilter& filter);

/// Removes all other tensors from the source. Throws as matching().
void narrow(Source& source, const TensorFilter& filter);

/// Returns the index of a name in the entries. Throws Error(not_found) with similar names.
std::size_t find_tensor(const Source& source, std::string_view name);

}  // namespace muster

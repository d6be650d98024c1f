// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checks whether a checkpoint, a directory of shards, a workspace or a file is complete and intact. All problems are
// reported, not only the first. docs/reference/shard-file.md describes the checksum file of a checkpoint.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/omission.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"

namespace muster {

/// The category of a problem, for programs that handle some categories differently.
enum class Defect : std::uint8_t {
  file,         ///< a file cannot be opened, or its header contradicts itself
  missing,      ///< a file, a rank or a tensor is missing
  not_indexed,  ///< a file or a tensor exists, but the index does not list it
  duplicate,    ///< one name occurs in two places
  index,        ///< the index is not valid JSON, or contradicts the files
  numbering,    ///< the numbers of files or ranks have gaps, or different totals
  mismatch,     ///< shards differ in data that must be equal
  leftover,     ///< a workspace contains leftovers of a process that no longer exists
  checksum,     ///< the bytes of a tensor differ from its checksum, or the checksums belong to other tensors
  unreadable,   ///< the file contains the data, but this program cannot read it
};
/// Returns the name of a defect.
std::string_view to_string(Defect defect) noexcept;

/// A problem that verify() found.
struct VerifyProblem {
  /// The kind of problem.
  Defect defect = Defect::file;
  std::string file = {};     ///< name in the directory; may be empty
  std::string tensor = {};   ///< may be empty
  std::string message = {};  ///< the complete message
};

/// The kind of object that `path` was identified as.
enum class VerifiedKind : std::uint8_t { checkpoint, shards, file, state, workspace, foreign };

/// The result of verify().
struct VerifyReport {
  /// The path that was verified.
  std::string path;
  /// The kind of object that was verified.
  VerifiedKind kind = VerifiedKind::checkpoint;
  std::uint64_t files = 0;    ///< files with tensors that could be opened
  std::uint64_t tensors = 0;  ///< tensors in these files
  std::uint64_t bytes = 0;    ///< bytes of these tensors
  /// True if a checkpoint has a checksum file, or if state files or a third-party checkpoint contain checksums.
  bool has_checksums = false;
  std::uint64_t checked = 0;                 ///< tensors whose bytes were compared with checksums
  std::vector<VerifyProblem> problems = {};  ///< at most 10,000
  std::uint64_t problems_left_out = 0;       ///< number of further problems
  Omissions left_out = {};                   ///< weights in the directory that are not part of the verified object
  std::uint64_t not_selected = 0;            ///< tensors that the options do not select: neither counted nor read
  std::vector<std::string> notes = {};       ///< findings that are not problems

  /// Returns whether there are no problems.
  [[nodiscard]] bool is_good() const noexcept { return problems.empty(); }
};

/// Options of verify().
struct VerifyOptions {
  bool checksums = true;           ///< reads all tensors that have checksums; false: only headers
  ProgressCallback progress = {};  ///< reports the bytes read
  /// For a third-party checkpoint: as in ExportOptions (export.hpp).
  std::string key = {};
  /// See `key`.
  std::string file_pattern = {};
  /// If `plan`, `base_model` or `source_layout` is set, an export with them is also planned, and tensors that do not
  /// fit are problems. Rank shards that record their plan are always checked against it.
  std::string plan = {};
  std::string base_model = {};                       ///< a model directory, as in ExportOptions
  std::optional<ParallelLayout> source_layout = {};  ///< layout of the ranks, as in ExportOptions
  /// Globs, as in ExportOptions: only tensors with a matching name are read, counted and reported. Problems of whole
  /// files are always reported.
  std::string select = {};
  std::string exclude = {};  ///< see `select`
};

/// Verifies `path` and reports all problems. Local. `path` is a directory in the Hugging Face layout, a workspace, or a
/// single file (safetensors, state file or other HDF5) in any condition. A directory with
/// rank-00000-of-0000N.safetensors and without a model is verified as rank shards. The call opens nothing outside of
/// `path`, and allocates no more than the headers of the files justify. Several threads read the tensors in pieces, so
/// memory is a few MiB.
///
/// A checkpoint is good if:
/// - the index and the files agree about every tensor, and no name is in two files;
/// - metadata.total_size is the number of bytes of the tensors (tied ones may count twice);
/// - all numbered files exist;
/// - the checksums, if there are any, match and cover all tensors.
///
/// Files that are not part of it are listed and not verified. Shards are good if all ranks exist, and their metadata
/// agrees with their names and with each other. Ranks that hold the same part of a model must have the same names,
/// dtypes and numbers of dimensions. A state file is good if its commit mark, its catalogue and all tensors are intact.
/// A workspace is good if all its states are good, each job has a state of every rank, and it contains no leftovers of
/// processes that no longer exist.
///
/// Throws Error(not_found) if there is nothing to verify, Error(io) if a directory cannot be read, Error(version) if a
/// newer Muster wrote it, Error(invalid_argument) if no tensor is selected. With a plan, a base or a layout, throws
/// Error(invalid_argument | not_found) as export_model().
VerifyReport verify(const std::string& path, const VerifyOptions& options = {});

/// Writes muster.checksums.json next to a checkpoint and replaces an existing one. Returns the number of tensors.
/// Local. Throws Error(invalid_argument) if `path` is not a checkpoint directory or is incomplete; the message contains
/// the first problem. Throws Error(io | out_of_space).
std::uint64_t write_checksums(const std::string& path, const ProgressCallback& progress = {});

}  // namespace muster

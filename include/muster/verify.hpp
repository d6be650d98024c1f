// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether a checkpoint, a directory of shards, a workspace or a file is whole: everything that is wrong with it, not
// only the first thing. The format of the checksums beside a checkpoint: docs/inspecting.md.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/omission.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"

namespace muster {

/// What is wrong, as a program can branch on it.
enum class Defect : std::uint8_t {
  file,        ///< a file cannot be opened, or its header contradicts itself
  missing,     ///< a file, a rank or a tensor is not there
  unindexed,   ///< a file or a tensor is there, and the index does not have it
  twice,       ///< one name in two places
  index,       ///< the index is none, or says what is not so
  numbering,   ///< files or ranks are numbered with holes, or by different counts
  disagree,    ///< shards differ in what must be the same
  left,        ///< in a workspace: what a process that is gone has left
  checksum,    ///< a tensor's bytes are not those that were written, or the checksums are none of these tensors
  unreadable,  ///< the file has the data, and this program cannot read it
};
std::string_view to_string(Defect defect) noexcept;

struct VerifyProblem {
  Defect defect = Defect::file;
  std::string file = {};    ///< a name in the directory; may be empty
  std::string tensor = {};  ///< may be empty
  std::string words = {};   ///< the whole, for people
};

/// What it was taken for.
enum class VerifiedKind : std::uint8_t { checkpoint, shards, file, state, workspace, foreign };

struct VerifyReport {
  std::string path;
  VerifiedKind kind = VerifiedKind::checkpoint;
  std::uint64_t files = 0;                   ///< with tensors, that could be opened
  std::uint64_t tensors = 0;                 ///< in them
  std::uint64_t bytes = 0;                   ///< of these
  bool has_checksums = false;                ///< beside a checkpoint, in state files, or in a foreign checkpoint's
  std::uint64_t checked = 0;                 ///< tensors whose bytes were read and compared with checksums
  std::vector<VerifyProblem> problems = {};  ///< at most 10,000
  std::uint64_t problems_left_out = 0;       ///< beyond these
  Omissions left_out = {};                   ///< weights in the directory that are no part of what was verified

  [[nodiscard]] bool is_good() const noexcept { return problems.empty(); }
};

struct VerifyOptions {
  bool checksums = true;           ///< read all tensors where there are checksums; false: headers only
  ProgressCallback progress = {};  ///< of the reading
  /// Of a foreign checkpoint: what of it is meant (export.hpp).
  std::string at = {};
  std::string shards = {};
  /// With one of these, an export with them is planned, too, and tensors that do not fit are problems.
  /// Shards of ranks that name their plan are held against that in any case.
  std::string plan = {};
  std::string base = {};                      ///< a model's directory, as for an export
  std::optional<ParallelLayout> layout = {};  ///< of the ranks, likewise
};

/// `path`: a directory in HuggingFace's layout (with rank-00000-of-0000N.safetensors and no model beside them: shards
/// of ranks), a workspace, or one file: safetensors, state or other HDF5, in whatever state. Local. Opens nothing
/// outside it and allocates what the files' own headers justify. Tensors are read in pieces by several threads, so that
/// memory is some MiB.
///
/// A checkpoint is good if the index and the files agree about every tensor, no name is in two files,
/// metadata.total_size is the tensors' bytes (tied ones may count twice), numbered files are all there, and checksums,
/// where there are some, are those of all tensors. Files that are no part of it are listed and not verified. Shards are
/// good where all ranks are there, their metadata agrees with their names and with each other, and ranks that have the
/// same part of a model in common have the same names, dtypes and numbers of dimensions. A state file is good where its
/// commit mark, its catalogue and all tensors are what was written; a workspace where that is so of all its states,
/// each job has one of every rank, and nothing is left by processes that are gone.
///
/// Throws Error(not_found) if there is nothing to verify, Error(io) if a directory cannot be read, Error(version)
/// where a newer Muster made it; with a plan, a base or a layout Error(argument | not_found) as export_model.
VerifyReport verify(const std::string& path, const VerifyOptions& options = {});

/// Makes muster.checksums.json beside a checkpoint, replacing an older one; returns the number of tensors. Local.
/// Throws Error(argument) if `path` is no checkpoint's directory or is not whole (the first problem is in the
/// words); Error(io | no_space).
std::uint64_t write_checksums(const std::string& path, const ProgressCallback& progress = {});

}  // namespace muster

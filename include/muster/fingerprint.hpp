// SPDX-License-Identifier: Apache-2.0
#pragma once
// Fingerprints show that two programs, files or machines hold the same weights, without copying the weights. A
// fingerprint has one CRC-64/XZ per tensor, over its elements in row-major order, and a hash of all tensors. It does
// not depend on the layout over ranks, the number of files, or the order of tensors. It detects accidental changes, not
// attacks.

#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "muster/group.hpp"
#include "muster/parallel_layout.hpp"
#include "muster/progress.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// The fingerprint of one tensor.
struct TensorFingerprint {
  std::string name;       ///< name in the merged model
  TensorSpec spec;        ///< dtype and shape
  std::uint64_t crc = 0;  ///< CRC-64/XZ of the bytes of the elements
  friend bool operator==(const TensorFingerprint&, const TensorFingerprint&) = default;
};

/// The fingerprint of a model.
struct Fingerprint {
  std::vector<TensorFingerprint> tensors = {};  ///< in ascending order of names, each name once

  /// Returns the XXH3-128 of the lines of all tensors, as 32 hexadecimal digits.
  [[nodiscard]] std::string hash() const;
  /// Returns one line per tensor, `CRC  DTYPE SHAPE  NAME`, and the line `model HASH` (docs/reference/fingerprints.md).
  [[nodiscard]] std::string text() const;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

/// Returns the fingerprint that text() has written. Local. Throws Error(corrupt), which names the line, if the text is
/// malformed or incomplete, or if the hash in it is not the hash of its lines.
Fingerprint parse_fingerprint(std::string_view text);

/// The kind of a difference between two tensors of one name.
enum class FingerprintDefect : std::uint8_t {
  missing,  ///< only the expected fingerprint has the tensor
  extra,    ///< only the found fingerprint has the tensor
  dtype,    ///< the dtypes differ
  shape,    ///< the dtypes are equal, the shapes differ
  content,  ///< only the elements differ
};
/// Returns "missing", "extra", "dtype", "shape" or "content".
std::string_view to_string(FingerprintDefect defect) noexcept;

/// A tensor that differs between two fingerprints.
struct FingerprintDifference {
  FingerprintDefect defect = FingerprintDefect::content;  ///< the kind of the difference
  std::optional<TensorFingerprint> expected = {};         ///< unset if the tensor is extra
  std::optional<TensorFingerprint> found = {};            ///< unset if the tensor is missing

  /// Returns the name of the tensor.
  [[nodiscard]] const std::string& name() const { return expected ? expected->name : found->name; }
};
/// Returns one line that names the tensor and both sides, without a line break.
std::string to_string(const FingerprintDifference& difference);

/// Returns the tensors that differ, in ascending order of names; empty if both are equal. Local.
std::vector<FingerprintDifference> differences(const Fingerprint& expected, const Fingerprint& found);

/// Options of fingerprint_of() and fingerprint().
struct FingerprintOptions {
  std::string plan = {};     ///< merges shards; empty: the recorded plan, or no plan if the source is not of ranks
  std::string select = {};   ///< a glob: only tensors with a matching name; empty: all
  std::string exclude = {};  ///< a glob: leaves out tensors with a matching name
  std::optional<DType> dtype = {};                   ///< as ExportOptions::dtype
  bool cast_all = false;                             ///< as ExportOptions::cast_all
  std::optional<ParallelLayout> source_layout = {};  ///< as ExportOptions::source_layout
  std::string base_model = {};                       ///< a model directory whose config.json the plan reads
  std::string job_id = {};                           ///< as ExportOptions::job_id
  std::optional<std::uint64_t> step = {};            ///< as ExportOptions::step
  std::optional<int> rank = {};                      ///< workspace only: the state of this rank alone
  std::string key = {};                              ///< as ExportOptions::key
  std::string file_pattern = {};                     ///< as ExportOptions::file_pattern
  ProgressCallback progress = {};                    ///< reports the bytes read
  std::stop_token stop = {};                         ///< a stop request ends the call with Error(cancelled)
};

/// Returns the fingerprint of a safetensors file, a state file or other HDF5 file, a model directory, a workspace,
/// shards of ranks, or a third-party checkpoint. Local; uses several threads, and memory for a few pieces of 8 MiB.
/// Shards and states of ranks are merged as in an export while they are read. Without a plan, the tensors of a
/// workspace of several ranks are named "rank2/NAME".
///
/// Throws Error(not_found) if the path does not exist or no name matches. Throws Error(corrupt | io), which names the
/// file, if a file is damaged or cannot be read. Throws Error(unsupported) if a tensor cannot be read, or `dtype` is
/// set for a state file or HDF5 file. Throws Error(invalid_argument) if shards have no plan, or if a plan or dtype does
/// not fit, as export_model() does. Throws Error(rank_mismatch) if ranks that must have the same values differ.
Fingerprint fingerprint_of(const std::string& path, const FingerprintOptions& options = {});

/// Returns, on every rank, the fingerprint of the tensors that all ranks have in memory. Collective; uses several
/// threads. Every rank passes its parts; a rank without parts passes an empty list. The parts of all ranks must cover
/// every element of each tensor. Parts may overlap if their common elements are equal bit by bit (replicas). Tensors
/// may be strided, and must not change during the call. Without `plan` and `dtype`, and with tensors in host memory,
/// ranks exchange only the list of parts and 8 bytes per part.
///
/// With `plan`, TensorPart::name is the name that the plan expects on a rank, as for export_model(). With a plan or
/// `dtype`, or if a tensor is on a GPU, ranks exchange elements through windows of 256 MiB in total, as an export does.
/// The result is then the fingerprint of the checkpoint that export_model() would write, with two exceptions. An output
/// head that config.json of `base_model` ties to the embeddings is not left out. Without `cast_all`, only the tensors
/// themselves decide which of them remain F32.
///
/// Only rank 0 uses the options, except for `progress` and `stop`. `job_id`, `step`, `rank`, `key` and `file_pattern`
/// are for files: if one is set, all ranks throw Error(unsupported).
///
/// Each failure is one error that all ranks throw. It names the tensor and the ranks. The group remains usable after
/// these errors.
/// - Error(rank_mismatch): replicas differ, or a tensor has two shapes or dtypes.
/// - Error(invalid_argument): elements are in no part, a part is outside its tensor, or the plan does not fit.
/// - Error(not_found): no name is selected.
/// - Error(unsupported): packed elements of two parts share a byte, or an option is set that the call does not use.
///
/// Error(timeout | peer_lost | cancelled) aborts the group.
Fingerprint fingerprint(std::span<const TensorPart> parts, Group& group, const FingerprintOptions& options = {});

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reports of an export, a verification, a workspace and its clean-up, and the comparison of two paths: as text for
// people, and as a tree for JSON (docs/reference/json-output.md). Lines end with '\n'.

#include <chrono>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/export.hpp"
#include "muster/fingerprint.hpp"
#include "muster/verify.hpp"
#include "src/checkpoint/source.hpp"
#include "src/inspect/output.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/survey.hpp"

namespace muster::inspect {

// Reports on the tensors of an export.

/// Returns one line per tensor with its rule, action, sources and result, followed by the totals.
std::string account_table(const ExportManifest& account, const OutputStyle& style);
/// {"plan", "layout", "to", "in": {"tensors", "bytes"}, "out": {"tensors", "bytes", "files"}, "tensors": [{"name",
/// "origin", "rule", "action", "dtype", "shape", "file", "sources": [{"rank", "name", "dtype", "shape"}]}], "dropped":
/// [the same]}.
Config account_tree(const ExportManifest& account);
/// Returns the totals alone: "291 tensors of 4 ranks (201.3 MB) merged into 75 (199.0 MB in 2 files), 3 dropped".
std::string account_line(const ExportManifest& account);

/// Returns one line per note.
std::string notes_lines(const std::vector<std::string>& notes);
/// Returns one line that begins with "skipped: "; empty if all files were copied.
std::string skipped_line(const Omissions& skipped);
/// [{"file", "reason"}].
ConfigArray skipped_tree(const Omissions& skipped);
/// [{"name", "reason"}].
ConfigArray omissions_tree(const Omissions& omissions);

/// Returns one line per problem and one for the whole.
std::string verify_text(const VerifyReport& report);

/// {"good", "path", "kind", "files", "tensors", "bytes", "has_checksums", "checked", "problems": [{"defect", "file",
/// "tensor", "message"}], "problems_left_out"}.
Config verify_tree(const VerifyReport& report);

using workspace::age_text;

/// Parses "90", "30min", "12h" or "2d": a number and s, min, h, d or w; seconds without a unit. Throws
/// Error(invalid_argument).
std::chrono::seconds parse_age(const std::string& text);

/// Parses a size such as "500MB", "1.5 GiB" or "17"; kB is 1000 bytes and KiB 1024. Throws Error(invalid_argument) on
/// anything else, and on less than one byte.
std::uint64_t parse_size(const std::string& text);

/// Returns the jobs, the states of their ranks, and the other files of the workspace.
std::string survey_text(const workspace::Survey& survey, std::chrono::system_clock::time_point now,
                        const OutputStyle& style);
Config survey_tree(const workspace::Survey& survey, std::chrono::system_clock::time_point now);

/// Returns every file with its action, and the totals.
std::string gc_text(const workspace::GcReport& report, bool is_dry_run, const OutputStyle& style);
Config gc_tree(const workspace::GcReport& report, bool is_dry_run);

/// {"path", "hash", "tensors": [{"name", "dtype", "shape", "crc"}]}.
Config fingerprint_tree(const std::string& path, const Fingerprint& fingerprint);
/// The same without "path".
Config fingerprint_tree(const Fingerprint& fingerprint);

/// Compares a path with the fingerprint that a file contains.
/// {"same", "path", "file", "hash", "expected_hash", "compared", "differences": [{"name", "kind", "expected": {"dtype",
/// "shape", "crc"}, "found": the same}]}; a side without the tensor is null.
Config fingerprint_check_tree(const std::string& path, const std::string& file, const Fingerprint& expected,
                              const Fingerprint& found);
/// Returns one line per difference and one for the whole.
std::string fingerprint_check_text(const Fingerprint& expected, const Fingerprint& found);

/// Compares two files, model directories, workspaces or directories with the shards of ranks, for `muster diff`.
/// Tensors are matched by name and compared bit for bit, whichever files they are in. Other files are compared if
/// both paths are directories and the filter selects all tensors. Configs are compared if one side is a state; the
/// config of a safetensors file is its metadata (shard_set.hpp). Memory is that of a few pieces of some MiB. Shards and
/// the states of ranks are merged by `options.plan` (a name, "auto", a file) while they are read, each with its own
/// directory's config.json. Throws like open_source; Error(rank_mismatch) if ranks that must have the same values
/// differ.
///
/// {"same", "a", "b", "tensors", "bytes", "files", "config", "metadata_differs", "tensor_differences": [{"name",
/// "kind", "a", "b", "compared", "differing", "nans", "absolute", "relative"}], "file_differences": [{"name", "kind",
/// "detail"}], "config_differences": [{"place", "a", "b"}], "config_differences_in_all"}
/// (docs/reference/json-output.md); numbers that are not finite are strings. At most 1000 places of the config are
/// listed.
Config diff_models(const std::string& a, const std::string& b, const SourceOptions& options = {},
                   const TensorFilter& filter = {});
/// Compares two open sources, which the filter has narrowed. `options` opened them.
Config diff_sources(const Source& a, const Source& b, const SourceOptions& options, const TensorFilter& filter,
                    const ProgressCallback& progress = {});

/// The kinds of differences of a tensor or a file.
inline constexpr std::string_view only_in_a = "only in A";
inline constexpr std::string_view only_in_b = "only in B";
inline constexpr std::string_view other_type = "type";
inline constexpr std::string_view other_values = "values";
/// Returns the "absolute" or "relative" difference of an item of "tensor_differences" whose kind is other_values. JSON
/// cannot express infinities, so these are texts.
double distance_of(const Config& diff, const char* key);

enum class DiffOrder : std::uint8_t {
  file,      ///< as in A, then the tensors that only B has
  name,      ///< numbers in names by their value
  relative,  ///< the largest relative difference first; before them tensors without one
};
/// Sorts the tensors of a report of diff_models().
void sort_differences(Config& report, DiffOrder order);

/// Returns the comparison as text: one line per difference and one for the whole.
std::string diff_text(const Config& report);

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the program says of an export, a verification, a workspace and its clean-up: as text for people, and as a tree
// for JSON (docs/inspecting.md). Lines end with '\n'.

#include <chrono>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/export.hpp"
#include "muster/verify.hpp"
#include "src/inspect/output.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/survey.hpp"

namespace muster::inspect {
// What becomes of the tensors of an export.

/// A line for each tensor: rule, action, what comes from which ranks, what it becomes; then the sums.
std::string account_table(const ExportAccount& account, const OutputStyle& style);
/// {"plan", "layout", "to", "in": {"tensors", "bytes"}, "out": {"tensors", "bytes", "files"}, "tensors": [{"name",
/// "origin", "rule", "action", "dtype", "shape", "file", "sources": [{"rank", "name", "dtype", "shape"}]}], "dropped":
/// [the same]}.
Config account_tree(const ExportAccount& account);
/// The sums alone: "291 tensors of 4 ranks (201.3 MB) merged into 75 (199.0 MB in 2 files), 3 dropped".
std::string account_line(const ExportAccount& account);

/// A line each.
std::string notes_lines(const std::vector<std::string>& notes);
/// "not carried: ...", a line with its end; empty if all went along.
std::string left_line(const std::vector<LeftFile>& left);

/// A line for each problem and one for the whole.
std::string verify_text(const VerifyReport& report);

/// {"good", "path", "kind", "files", "tensors", "bytes", "has_checksums", "checked", "problems": [{"defect", "file",
/// "tensor", "words"}], "problems_left_out"}.
Config verify_tree(const VerifyReport& report);

using workspace::age_text;

/// "90", "30min", "12h", "2d": a number and s, min, h, d or w; seconds if there is none. Throws Error(argument).
std::chrono::seconds parse_age(const std::string& text);

/// Jobs, their ranks' states, and what else lies there.
std::string survey_text(const workspace::Survey& survey, std::chrono::system_clock::time_point now,
                        const OutputStyle& style);
Config survey_tree(const workspace::Survey& survey, std::chrono::system_clock::time_point now);

/// Every file with its verdict, and the sum.
std::string gc_text(const workspace::GcReport& report, bool is_dry_run, const OutputStyle& style);
Config gc_tree(const workspace::GcReport& report, bool is_dry_run);

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What becomes of the tensors of an export: as a table for people, and as JSON.

#include <string>

#include "muster/export.hpp"
#include "src/inspect/output.hpp"

namespace muster::inspect {

/// A line for each tensor: rule, action, what comes from which ranks, what it becomes; then the sums.
std::string account_table(const ExportAccount& account, const OutputStyle& style);
/// {"plan", "layout", "to", "in": {"tensors", "bytes"}, "out": {"tensors", "bytes", "files"}, "tensors": [{"name",
/// "origin", "rule", "action", "dtype", "shape", "file", "sources": [{"rank", "name", "dtype", "shape"}]}], "dropped":
/// [the same]}.
Config account_tree(const ExportAccount& account);
/// The sums alone: "291 tensors of 4 ranks (201.3 MB) merged into 75 (199.0 MB in 2 files), 3 dropped".
std::string account_line(const ExportAccount& account);

/// "not carried: ...", a line with its end; empty if all went along.
std::string left_line(const std::vector<LeftFile>& left);

}  // namespace muster::inspect

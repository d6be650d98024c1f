// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster show` says of a file, a directory or a workspace. Only headers are read.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/inspect/output.hpp"
#include "src/inspect/source.hpp"

namespace muster::inspect {

enum class ShowOrder : std::uint8_t {
  natural,  ///< by name, numbers in names by their value: what a tree is best in
  offset,   ///< as they lie in the files
  name,
  size,  ///< largest first
};

enum class ShowView : std::uint8_t {
  table,  ///< a line a tensor
  tree,   ///< by the dots and slashes in names; neighbours that are alike but for their number are one
};

struct ShowOptions {
  std::string pattern = {};  ///< only tensors whose names match (TensorPattern::glob); empty: all
  ShowOrder order = ShowOrder::offset;
  ShowView view = ShowView::table;
  bool is_unfolded = false;  ///< a tree with all of those that are alike
  bool has_issues = false;   ///< JSON: with "issues"
  OutputStyle style = {};
};

/// A table or a tree, totals by dtype, metadata. Lines end with '\n'. Throws like TensorPattern::glob and as the
/// source's own.
std::string show_text(const Source& source, const ShowOptions& options = {});

/// One JSON object; its keys are in docs/inspecting.md. Throws likewise, and what `sink` throws.
void show_json(const Source& source, const ShowOptions& options, const Sink& sink);

/// The config, or the part of it at `place`: keys and numbers of items with dots between them ("layers.0.hidden_size";
/// keys may have dots). Indented JSON text and '\n'. Throws Error(not_found) where there is no config or nothing at
/// that place (with what there is), Error(corrupt | io).
std::string show_config(const Source& source, const std::string& place);

/// What may be wrong, as far as headers tell: what the source found itself, and tensors that are empty, not aligned, of
/// odd names, or of the same bytes as another one.
std::vector<SourceIssue> find_issues(const Source& source);

/// A line an issue and one for the whole.
std::string issues_text(const std::vector<SourceIssue>& issues, const OutputStyle& style);

}  // namespace muster::inspect

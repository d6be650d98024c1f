// SPDX-License-Identifier: Apache-2.0
#pragma once
// The output of `muster show` and `muster cat` for a file, a directory or a workspace.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/safetensors.hpp"
#include "muster/tensor.hpp"
#include "src/checkpoint/source.hpp"
#include "src/inspect/output.hpp"

namespace muster::inspect {

enum class ShowOrder : std::uint8_t {
  natural,  ///< by name, numbers in names by their value: the best order for a tree
  offset,   ///< in the order of their offsets in the files
  name,
  size,  ///< largest first
};

enum class ShowView : std::uint8_t {
  table,  ///< one line per tensor
  tree,   ///< by the dots and slashes in names; neighbours that differ only in their number are merged
};

struct ShowOptions {
  TensorFilter filter = {};
  ShowOrder order = ShowOrder::offset;
  ShowView view = ShowView::table;
  bool is_unfolded = false;  ///< a tree in which similar neighbours are not merged
  bool has_issues = false;   ///< JSON: with "issues"
  OutputStyle style = {};
};

/// Returns a table or a tree, totals by dtype, and metadata. Lines end with '\n'. Throws like TensorPattern::glob and
/// as the source does.
std::string show_text(const Source& source, const ShowOptions& options = {});

/// Writes one JSON object; its keys are in docs/reference/json-output.md. Throws as show_text, and what `sink` throws.
void show_json(const Source& source, const ShowOptions& options, const Sink& sink);

/// Returns the config, or the part of it at `place`, as indented JSON text and '\n'. `place` has keys and indices with
/// dots between them ("layers.0.hidden_size"; keys may contain dots). Throws Error(not_found) if there is no config or
/// nothing at that place (the message lists the existing keys), Error(corrupt | io).
std::string show_config(const Source& source, const std::string& place);

/// {"path", "tensors", "bytes"}.
Config file_tree(const SourceFile& file);
/// {"kind", "tensor", "message"}; "tensor" is null for the whole source.
Config issue_tree(const SourceIssue& issue);

/// Finds possible defects from headers alone: the issues that the source found itself, and tensors that are empty,
/// misaligned, oddly named, or share bytes with another one.
std::vector<SourceIssue> find_issues(const Source& source);

/// Returns one line per issue and one for the whole.
std::string issues_text(const std::vector<SourceIssue>& issues, const OutputStyle& style);

// The output of `muster cat`: the values of tensors, or of parts of them.

// Selects elements of a tensor by the part of NumPy's indexing that names a regular grid: integers, begin:end:step,
// "..."; negative indices count from the end.

/// The elements of one dimension: begin, begin + step, ..., `count` of them.
struct SelectedRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t step = 1;
  bool is_kept = true;  ///< false: a single index, so the result lacks this dimension
};

struct ElementSelection {
  std::vector<SelectedRange> ranges;  ///< one per dimension of the tensor

  [[nodiscard]] Shape shape() const;
  /// Whether all elements are selected, in their order.
  [[nodiscard]] bool is_whole(const Shape& tensor) const;
};

/// Parses the text between the brackets: "0:4, ::2, -1", "..., 0"; empty selects all. As in NumPy, slices are limited
/// to the dimension and integers are not. Throws Error(invalid_argument) that names the invalid part and the reason.
ElementSelection parse_selection(std::string_view text, const Shape& shape);

enum class CatFormat : std::uint8_t {
  text,  ///< as NumPy prints an array, after a line with the tensor's name
  json,  ///< {"name", "dtype", "shape", "slice", "values"} and a line break (docs/reference/json-output.md)
  raw,   ///< the elements' bytes, row-major; packed elements two per byte, the first in the low half
};

struct CatOptions {
  CatFormat format = CatFormat::text;
  bool is_full = false;  ///< text: print all elements; otherwise long dimensions are abbreviated above 1000 elements
  OutputStyle style = {};
};

/// Prints the values of a tensor. `what` is a tensor's name, or a name and a slice, "w[0:4, ::2, -1]". Reads little
/// more than it prints; memory is some MiB whatever the tensor's size. Throws Error(not_found) with similar names if
/// the tensor does not exist; Error(invalid_argument) if the slice is not valid; as TensorSource::read; and what `sink`
/// throws.
void cat(const Source& source, const std::string& what, const CatOptions& options, const Sink& sink);

// Tensors as a tree, by the dots and slashes in their names.

/// A part of a name, and the subtree below it. Labels are views of the entries' names. Several parts form one label if
/// no branch separates them.
struct NameNode {
  std::string_view label;
  std::optional<std::size_t> tensor = {};  ///< index of the entry whose name ends here
  std::vector<NameNode> children = {};
  std::uint64_t tensors = 0;  ///< tensors in this node and below it
  std::uint64_t bytes = 0;
  std::uint64_t alike = 1;     ///< the number of neighbours that this node represents: they differ only in their number
  std::string_view last = {};  ///< label of the last one
};

/// Builds the tree. `places` are indices of entries, in the order of the tree. Similar neighbours are merged if
/// `folds`.
std::vector<NameNode> name_tree(const std::vector<TensorEntry>& entries, const std::vector<std::size_t>& places,
                                bool folds);

}  // namespace muster::inspect

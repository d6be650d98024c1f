// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster show` and `muster cat` say of a file, a directory or a workspace.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/safetensors.hpp"
#include "muster/tensor.hpp"
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
/// keys may have dots). Indented JSON text and '\n'. Throws Error(not_found) if there is no config or nothing at
/// that place (with what there is), Error(corrupt | io).
std::string show_config(const Source& source, const std::string& place);

/// What may be wrong, as far as headers tell: what the source found itself, and tensors that are empty, not aligned, of
/// odd names, or of the same bytes as another one.
std::vector<SourceIssue> find_issues(const Source& source);

/// A line an issue and one for the whole.
std::string issues_text(const std::vector<SourceIssue>& issues, const OutputStyle& style);

// What `muster cat` says: the values of tensors, or of parts of them.

// Which elements of a tensor are meant: the part of NumPy's indexing that names a regular grid of them: integers,
// begin:end:step, "..."; negative ones count from the end.

/// The elements of one dimension: begin, begin + step, ..., `count` of them.
struct SelectedRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t step = 1;
  bool is_kept = true;  ///< false: one index, and the dimension is gone from the result
};

struct Selection {
  std::vector<SelectedRange> ranges;  ///< one a dimension of the tensor

  [[nodiscard]] Shape shape() const;
  /// All elements, in their order.
  [[nodiscard]] bool is_whole(const Shape& tensor) const;
};

/// `text` is what stands between the brackets: "0:4, ::2, -1", "..., 0"; empty for all. As in NumPy, slices are cut
/// to the dimension and integers are not. Throws Error(argument) that says which part cannot be, and why.
Selection parse_selection(std::string_view text, const Shape& shape);

enum class CatFormat : std::uint8_t {
  text,  ///< as NumPy prints an array, after a line that names the tensor
  json,  ///< {"name", "dtype", "shape", "slice", "values"} and a line break (docs/inspecting.md)
  raw,   ///< the elements' bytes, row-major; packed ones two to a byte, the first in the low half
};

struct CatOptions {
  CatFormat format = CatFormat::text;
  bool is_full = false;  ///< text: all elements; else the middle of long dimensions is left out above 1000 elements
  OutputStyle style = {};
};

/// `what`: a tensor's name, or a name and a slice, "w[0:4, ::2, -1]". Reads what it prints and little
/// more; memory is some MiB whatever the tensor's size. Throws Error(not_found) if there is no such tensor, with
/// names that are near it; Error(argument) if the slice cannot be; as TensorSource::read; what `sink` throws.
void cat(const Source& source, const std::string& what, const CatOptions& options, const Sink& sink);

// Tensors as a tree, by the dots and slashes in their names.

/// A part of a name, and what is below it. Labels are views of the entries' names; several parts are one label if
/// nothing branches between them.
struct NameNode {
  std::string_view label;
  std::optional<std::size_t> tensor = {};  ///< place in the entries, where a name ends here
  std::vector<NameNode> children = {};
  std::uint64_t tensors = 0;  ///< here and below
  std::uint64_t bytes = 0;
  std::uint64_t alike = 1;     ///< how many neighbours this one stands for: the same but for their number
  std::string_view last = {};  ///< the last one's label
};

/// `places`: of the entries, in the order that the tree is to have. Neighbours are put together if `folds`.
std::vector<NameNode> name_tree(const std::vector<TensorEntry>& entries, const std::vector<std::size_t>& places,
                                bool folds);

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster cat` says: the values of tensors, or of parts of them.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "muster/tensor.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/source.hpp"

namespace muster::inspect {
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
/// more; memory is some MiB whatever the tensor's size. Throws Error(not_found) where there is no such tensor, with
/// names that are near it; Error(argument) where the slice cannot be; as TensorSource::read; what `sink` throws.
void cat(const Source& source, const std::string& what, const CatOptions& options, const Sink& sink);

}  // namespace muster::inspect

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which elements of a tensor are meant: the part of NumPy's indexing that names a regular grid of them: integers,
// begin:end:step, "..." ; negative ones count from the end.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "muster/tensor.hpp"

namespace muster::inspect {

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

}  // namespace muster::inspect

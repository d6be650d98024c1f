// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds the parts of quantised weights among the tensors of a model: packed elements and their scales.

#include <set>
#include <span>
#include <string>
#include <string_view>

#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// Decides by names, dtypes and the other tensors of a module: a name such as "logit_scale" alone means nothing.
class PackedParts {
 public:
  explicit PackedParts(std::span<const NamedSpec> model);
  /// Whether some weight is quantised.
  [[nodiscard]] bool any() const noexcept { return !modules_.empty(); }
  /// Whether the tensor is packed, or belongs to a packed weight: a scale, a zero point, a table.
  [[nodiscard]] bool has(const NamedSpec& tensor) const;
  /// Whether the module that has the tensor, or the one around it, has a quantised weight.
  [[nodiscard]] bool is_in_packed_module(std::string_view name) const;

 private:
  std::set<std::string, std::less<>> modules_;
};

/// A number of 8 or 4 bits, or two in a byte: such a tensor is quantised by its dtype alone.
bool is_quantised_dtype(DType dtype);

/// Everything before the last dot of a name; empty if it has none.
std::string_view module_of(std::string_view name);

}  // namespace muster

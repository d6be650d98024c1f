// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds quantised weights among the tensors of a model: packed elements, and their scales, zero points and tables.

#include <set>
#include <span>
#include <string>
#include <string_view>

#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// Decides by the names, the dtypes and the other tensors of a module. A name such as "logit_scale" alone is not
/// enough.
class PackedParts {
 public:
  explicit PackedParts(std::span<const NamedSpec> model);
  /// Returns whether any weight is quantised.
  [[nodiscard]] bool any() const noexcept { return !modules_.empty(); }
  /// Returns whether the tensor is packed, or belongs to a packed weight (a scale, a zero point or a table).
  [[nodiscard]] bool has(const NamedSpec& tensor) const;
  /// Returns whether the module of the tensor, or its parent module, has a quantised weight.
  [[nodiscard]] bool is_in_packed_module(std::string_view name) const;

 private:
  std::set<std::string, std::less<>> modules_;
};

/// Returns true for floating point numbers of 8, 6 or 4 bits, and for packed dtypes. A tensor of such a dtype is always
/// quantised.
bool is_quantised_dtype(DType dtype);

/// Returns the part of a name before its last dot; empty if the name has no dot.
std::string_view module_of(std::string_view name);

}  // namespace muster

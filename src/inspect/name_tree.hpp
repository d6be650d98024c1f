// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors as a tree, by the dots and slashes in their names.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "muster/safetensors.hpp"

namespace muster::inspect {

/// A part of a name, and what is below it. Labels are views of the entries' names; several parts are one label where
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

/// `places`: of the entries, in the order that the tree is to have. Neighbours are put together where `folds`.
NameNode name_tree(const std::vector<TensorEntry>& entries, const std::vector<std::size_t>& places, bool folds);

}  // namespace muster::inspect

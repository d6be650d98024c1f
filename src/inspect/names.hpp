// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names that people type: which tensors they mean, and which they may have meant.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace muster::inspect {

class TensorSource;

/// Tensors whose names match (TensorPattern::glob), in their order; all where the pattern is empty. Throws
/// Error(argument) on a pattern that is none, Error(not_found) where no name matches, with names that are near.
std::vector<std::size_t> matching(const TensorSource& source, const std::string& pattern);

/// " (near: "a.weight", "b.weight")" where some names are like this one, else how many there are: for messages.
std::string near_names(const TensorSource& source, std::string_view name);

/// The tensor of that name. Throws Error(not_found) with names that are near.
std::size_t find_tensor(const TensorSource& source, const std::string& path, std::string_view name);

}  // namespace muster::inspect

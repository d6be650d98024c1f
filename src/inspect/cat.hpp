// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster cat` says: the values of tensors, or of parts of them.

#include <string>
#include <string_view>

#include "src/inspect/output.hpp"
#include "src/inspect/source.hpp"

namespace muster::inspect {

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

/// `what`: a tensor's name, or a name and a slice, "w[0:4, ::2, -1]" (selection.hpp). Reads what it prints and little
/// more; memory is some MiB whatever the tensor's size. Throws Error(not_found) where there is no such tensor, with
/// names that are near it; Error(argument) where the slice cannot be; as TensorSource::read; what `sink` throws.
void cat(const Source& source, const std::string& what, const CatOptions& options, const Sink& sink);

}  // namespace muster::inspect

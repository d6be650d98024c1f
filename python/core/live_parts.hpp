// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tensors of a state dict in memory, as the parts that this rank has.

#include <vector>

#include "muster/tensor.hpp"
#include "python/core/bindings.hpp"

namespace muster::python {

/// Converts a list of (name, tensor, whole, offset).
inline std::vector<TensorPart> parts_of(nb::handle list) {
  std::vector<TensorPart> parts;
  for (const nb::handle part : nb::iter(list))
    parts.push_back({.name = nb::cast<std::string>(part[0]),
                     .tensor = nb::cast<Tensor>(part[1]),
                     .whole = nb::cast<Shape>(nb::list(part[2])),
                     .offset = nb::cast<Shape>(nb::list(part[3]))});
  return parts;
}

/// Converts a state dict (muster._parts).
inline std::vector<TensorPart> live_parts_of(nb::handle state) {
  return parts_of(nb::module_::import_("muster._parts").attr("parts_of")(state));
}

}  // namespace muster::python

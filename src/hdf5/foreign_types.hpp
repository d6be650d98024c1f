// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an HDF5 datatype is among ours.

#include <hdf5.h>

#include <cstddef>
#include <optional>
#include <string>

#include "muster/dtype.hpp"

namespace muster::hdf5 {

struct ElementType {
  std::optional<DType> dtype = {};
  bool is_big_endian = false;
  std::size_t bytes = 0;     ///< of one element in the file
  bool is_text = false;      ///< a string: no tensor, but perhaps metadata
  std::string refusal = {};  ///< where it is neither
};

/// Looks at the type alone. Integers of 8 to 64 bits; IEEE and bfloat16 floats, and 8-bit ones of 4 or 5 exponent bits;
/// h5py's booleans {FALSE, TRUE}; compounds {r, i} of two F32. Nothing is converted by libhdf5, so e4m3 is what
/// HDF5 2.0 and machine learning mean by it.
ElementType element_type(hid_t type);

}  // namespace muster::hdf5

// SPDX-License-Identifier: Apache-2.0
#pragma once
// HDF5's types for Muster's dtypes: such that every tool that knows HDF5 reads right values or plain bits.

#include <cstddef>

#include "muster/dtype.hpp"
#include "src/hdf5/ids.hpp"

namespace muster::hdf5 {

/// The type in the file. What libhdf5 would read wrong (F8_E4M3, F8_E8M0: it has no such floats) and what it has no
/// type for (4-bit, two a byte) are unsigned bytes. Throws CallFailed.
Id file_type(DType dtype);

/// A string of exactly `bytes` bytes of UTF-8. Throws CallFailed.
Id text_type(std::size_t bytes);

}  // namespace muster::hdf5

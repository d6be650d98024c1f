// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CRC of a tensor from boxes of its elements, wherever these are. The remainder of a box is that of the whole
// tensor with zeros outside of the box. So the XOR of the remainders of boxes that cover the tensor, each element once,
// is the remainder of the tensor (core/crc64.hpp).

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "muster/tensor.hpp"

namespace muster::merge {

/// A box of a tensor, in memory.
struct PlacedBox {
  TensorView view;  ///< may be strided
  Shape whole;      ///< the shape of the tensor
  Shape begin;      ///< the position of the first element of the box in it
};

/// Returns the box with packed elements as bytes; a box of another dtype is unchanged. Throws Error(unsupported) with
/// the tensor's name if a row of packed elements begins or ends inside a byte.
PlacedBox in_bytes(PlacedBox box, std::string_view name);

/// Cuts a box into pieces of about `most` bytes, with rows as long as possible, and appends them. The dtype must not be
/// packed.
void cut_box(PlacedBox box, std::size_t most, std::vector<PlacedBox>& pieces);

/// Returns the remainder of a box that is inside its tensor. The dtype must not be packed. `memory` is used for rows
/// that are not contiguous in memory. Throws Error(invalid_argument) if the elements are on a GPU.
std::uint64_t box_remainder(const PlacedBox& box, std::vector<std::byte>& memory);

}  // namespace muster::merge

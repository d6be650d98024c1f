// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/mpi_pieces.hpp"

#include <algorithm>

#include "src/core/element_range.hpp"

namespace muster::mpi {

std::vector<Piece> cut(const std::vector<Placed>& tensors) {
  std::vector<Piece> pieces;
  bool is_packing = false;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Placed& tensor = tensors[i];
    if (tensor.bytes == 0) continue;
    if (tensor.bytes >= large_tensor) {
      for (std::uint64_t at = 0; at < tensor.bytes; at += cut_piece)
        pieces.push_back({tensor.offset + at, std::min(cut_piece, tensor.bytes - at), i, 1});
      is_packing = false;
      continue;
    }
    const std::uint64_t end = tensor.offset + tensor.bytes;
    if (is_packing && end - pieces.back().offset <= packed_piece) {
      pieces.back().bytes = end - pieces.back().offset;
      pieces.back().count = i + 1 - pieces.back().first;
      continue;
    }
    pieces.push_back({tensor.offset, tensor.bytes, i, 1});
    is_packing = true;
  }
  return pieces;
}

void pack(const Piece& piece, std::span<const Placed> places, std::span<const Tensor* const> tensors,
          std::byte* target) {
  const Placed& first = places[piece.first];
  if (piece.count == 1 && piece.bytes != first.bytes) {
    // A part of a large strided tensor.
    const TensorView& view = tensors[piece.first]->view();
    const auto item = static_cast<std::uint64_t>(itemsize(view.dtype()));
    const std::uint64_t inside = piece.offset - first.offset;
    core::copy_elements(view, static_cast<std::int64_t>(inside / item),
                        static_cast<std::int64_t>((inside + piece.bytes) / item), target);
    return;
  }
  for (std::size_t i = piece.first; i < piece.first + piece.count; ++i)
    if (places[i].bytes != 0) copy_contiguous(tensors[i]->view(), target + (places[i].offset - piece.offset));
}

}  // namespace muster::mpi

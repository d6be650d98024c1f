// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/mpi_tree.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <optional>

#include "src/core/descriptor.hpp"

namespace muster::mpi {

OutgoingTree::OutgoingTree(const Config& value, gather::Record& record) {
  core::SlotLayout layout;
  descriptor_ = core::encode_descriptor(value, [&](const Tensor& tensor) -> std::optional<core::Place> {
    record.payload_bytes += tensor.nbytes();
    places_.push_back({layout.place(tensor.nbytes()), tensor.nbytes()});
    tensors_.push_back(&tensor);
    return std::nullopt;
  });
  bytes_ = layout.size();
  record.descriptor_bytes = descriptor_.size();
  record.descriptor_hash = XXH3_64bits(descriptor_.data(), descriptor_.size());
  record.moving_bytes = bytes_;
}

void OutgoingTree::copy(std::byte* target) const {
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (places_[i].bytes != 0) copy_contiguous(tensors_[i]->view(), target + places_[i].offset);
}

bool OutgoingTree::is_packed(const Piece& piece) const {
  return piece.count != 1 || !tensors_[piece.first]->view().is_contiguous();
}

std::span<const std::byte> OutgoingTree::bytes_of(const Piece& piece) const {
  return tensors_[piece.first]->bytes().subspan(piece.offset - places_[piece.first].offset, piece.bytes);
}

const std::shared_ptr<const void>& OutgoingTree::owner_of(const Piece& piece) const {
  return tensors_[piece.first]->owner();
}

void OutgoingTree::pack(const Piece& piece, std::byte* target) const {
  mpi::pack(piece, places_, tensors_, target);
}

Config take_tree(std::span<const std::byte> descriptor, std::uint64_t bytes, const std::shared_ptr<std::byte>& buffer,
                 std::vector<Placed>& places) {
  return core::decode_descriptor(
      descriptor, [&](DType dtype, const Shape& shape, std::uint64_t length, core::Place place) -> Tensor {
        if (place.segment != 0 || place.offset > bytes || length > bytes - place.offset)
          throw Error(ErrorKind::corrupt, "a tensor lies outside what was announced");
        places.push_back({place.offset, length});
        if (length == 0) return {TensorView(dtype, shape, nullptr), nullptr};
        return {TensorView(dtype, shape, buffer.get() + place.offset), buffer};
      });
}

}  // namespace muster::mpi

// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/pieces.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "src/core/descriptor.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/fault.hpp"

namespace muster::multihost {
namespace {

std::uint64_t descriptor_hash_of(std::span<const std::byte> descriptor) noexcept {
  return XXH3_64bits(descriptor.data(), descriptor.size());
}

}  // namespace

std::vector<MessagePiece> cut(const std::vector<Placed>& tensors) {
  std::vector<MessagePiece> pieces;
  bool is_packing = false;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Placed& tensor = tensors[i];
    if (tensor.bytes == 0) continue;
    if (tensor.bytes >= large_tensor) {
      for (const MessagePiece& piece : cut_evenly(tensor, cut_piece))
        pieces.push_back({piece.offset, piece.bytes, i, 1});
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

std::vector<MessagePiece> cut_evenly(const Placed& tensor, std::uint64_t piece_bytes) {
  std::vector<MessagePiece> pieces;
  for (std::uint64_t at = 0; at < tensor.bytes; at += piece_bytes)
    pieces.push_back({tensor.offset + at, std::min(piece_bytes, tensor.bytes - at), 0, 1});
  return pieces;
}

OutgoingTree::OutgoingTree(const Config& value, gather::ExchangeRecord& record) {
  core::SlotLayout layout;
  descriptor_ = core::encode_descriptor(value, [&](const Tensor& tensor) -> std::optional<core::TensorLocation> {
    record.payload_bytes += tensor.nbytes();
    places_.push_back({layout.place(tensor.nbytes()), tensor.nbytes()});
    tensors_.push_back(&tensor);
    return std::nullopt;
  });
  bytes_ = layout.size();
  record.descriptor_bytes = descriptor_.size();
  record.descriptor_hash = hash_ = descriptor_hash_of(descriptor_);
  os::damage_descriptor(descriptor_);
  record.moving_bytes = bytes_;
}

std::vector<std::byte> OutgoingTree::message(std::span<const std::byte> front, bool with_bytes) const {
  std::vector<std::byte> message;
  message.reserve(front.size() + descriptor_.size() + (with_bytes ? bytes_ : 0));
  message.insert(message.end(), front.begin(), front.end());
  message.insert(message.end(), descriptor_.begin(), descriptor_.end());
  if (!with_bytes) return message;
  const std::size_t begin = message.size();
  message.resize(begin + bytes_);
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (places_[i].bytes != 0) copy_contiguous(tensors_[i]->view(), message.data() + begin + places_[i].offset);
  return message;
}

bool OutgoingTree::is_packed(const MessagePiece& piece) const {
  return piece.count != 1 || !tensors_[piece.first]->view().is_contiguous();
}

std::span<const std::byte> OutgoingTree::bytes_of(const MessagePiece& piece) const {
  return tensors_[piece.first]->bytes().subspan(piece.offset - places_[piece.first].offset, piece.bytes);
}

const std::shared_ptr<const void>& OutgoingTree::owner_of(const MessagePiece& piece) const {
  return tensors_[piece.first]->owner();
}

void OutgoingTree::pack(const MessagePiece& piece, std::byte* target) const {
  const Placed& first = places_[piece.first];
  if (piece.count == 1 && piece.bytes != first.bytes) {
    // A piece of a large strided tensor.
    const std::uint64_t inside = piece.offset - first.offset;
    merge::gapless(tensors_[piece.first]->view(), inside, inside + piece.bytes, target);
    return;
  }
  for (std::size_t i = piece.first; i < piece.first + piece.count; ++i)
    if (places_[i].bytes != 0) copy_contiguous(tensors_[i]->view(), target + (places_[i].offset - piece.offset));
}

IncomingTree take_tree(int sender, std::span<const std::byte> descriptor, std::uint64_t hash, std::uint64_t bytes,
                       const std::shared_ptr<std::byte>& buffer, std::span<const std::byte> riding) {
  IncomingTree tree;
  std::vector<Placed> places;
  try {
    if (descriptor_hash_of(descriptor) != hash)
      throw Error(ErrorKind::corrupt, "malformed message: the descriptor differs from the announced one");
    tree.config = core::decode_descriptor(
        descriptor, [&](DType dtype, const Shape& shape, std::uint64_t length, core::TensorLocation place) -> Tensor {
          if (place.segment != 0 || place.offset > bytes || length > bytes - place.offset)
            throw Error(ErrorKind::corrupt, "malformed message: a tensor exceeds the announced bytes");
          places.push_back({place.offset, length});
          if (length == 0) return {TensorView(dtype, shape, nullptr), nullptr};
          return {TensorView(dtype, shape, buffer.get() + place.offset), buffer};
        });
  } catch (const Error& error) {
    throw error.with_context(fmt::format("data of rank {}", sender));
  }
  if (riding.empty())
    tree.pieces = cut(places);
  else
    std::memcpy(buffer.get(), riding.data(), riding.size());
  return tree;
}

}  // namespace muster::multihost

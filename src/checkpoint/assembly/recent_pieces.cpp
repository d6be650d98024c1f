// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/recent_pieces.hpp"

#include <algorithm>
#include <cstring>

#include "src/checkpoint/assembly/checksums.hpp"

namespace muster {

void RecentPieces::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  const std::uint64_t end = offset + target.size();
  for (std::uint64_t at = offset; at < end;) {
    const std::uint64_t begin = at / checked_piece_bytes * checked_piece_bytes;
    const std::uint64_t bytes = std::min(checked_piece_bytes, tensors()[tensor].bytes - begin);
    const Use piece = use(tensor, begin);
    {
      const std::lock_guard lock(piece->reading);
      if (!piece->is_read) source_->read(tensor, begin, std::span(piece->bytes).first(bytes));
      piece->is_read = true;
    }
    const std::uint64_t length = std::min(begin + bytes, end) - at;
    std::memcpy(target.data() + (at - offset), piece->bytes.data() + (at - begin), length);
    at += length;
  }
}

RecentPieces::Use RecentPieces::use(std::size_t tensor, std::uint64_t begin) const {
  const std::lock_guard lock(mutex_);
  auto place = std::ranges::find_if(
      pieces_, [&](const auto& piece) { return piece->tensor == tensor && piece->begin == begin; });
  if (place == pieces_.end()) {
    const auto oldest =
        std::find_if(pieces_.rbegin(), pieces_.rend(), [](const auto& piece) { return piece->users == 0; });
    if (pieces_.size() < count_ || oldest == pieces_.rend()) {
      place = pieces_.insert(pieces_.end(), std::make_unique<RecentPiece>());
      (*place)->bytes.resize(checked_piece_bytes);
    } else {
      place = std::prev(oldest.base());
    }
    (*place)->tensor = tensor;
    (*place)->begin = begin;
    (*place)->is_read = false;
  }
  std::rotate(pieces_.begin(), place, std::next(place));
  RecentPiece* const piece = pieces_.front().get();
  ++piece->users;
  return {piece, [this](RecentPiece* used) {
            const std::lock_guard done(mutex_);
            --used->users;
          }};
}

}  // namespace muster

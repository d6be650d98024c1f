// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/row_copy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "muster/error.hpp"

namespace muster {
namespace {

// Runs at least this long are written from where they lie: copying them together would cost more than the calls.
constexpr std::uint64_t long_run = std::uint64_t{256} << 10;
constexpr std::array<std::byte, std::size_t{64} << 10> zeros{};

// A tensor seen as rows along one dimension.
class Rows {
 public:
  Rows(const TensorSpec& spec, std::size_t dim) {
    for (std::size_t d = 0; d < std::min(dim, spec.shape.size()); ++d) {
      count_ *= static_cast<std::uint64_t>(spec.shape[d]);
    }
    inner_bits_ = static_cast<std::uint64_t>(bits(spec.dtype));
    for (std::size_t d = dim + 1; d < spec.shape.size(); ++d) inner_bits_ *= static_cast<std::uint64_t>(spec.shape[d]);
    extent_ = spec.shape.empty() ? 1 : static_cast<std::uint64_t>(spec.shape[dim]);
  }

  [[nodiscard]] std::uint64_t count() const { return count_; }
  [[nodiscard]] std::uint64_t bytes() const { return offset(extent_); }
  /// Where the element `index` along the dimension begins, or the row's end.
  [[nodiscard]] std::uint64_t offset(std::uint64_t index) const {
    const std::uint64_t at = index * inner_bits_;
    // Only the very end of a packed tensor may be half a byte.
    if (at % 8 != 0 && (index != extent_ || count_ != 1)) {
      throw Error(ErrorKind::unsupported, "two packed 4-bit elements of different slices would share a byte");
    }
    return (at + 7) / 8;
  }
  [[nodiscard]] std::uint64_t offset(std::int64_t index) const { return offset(static_cast<std::uint64_t>(index)); }

 private:
  std::uint64_t count_ = 1;
  std::uint64_t inner_bits_ = 0;
  std::uint64_t extent_ = 0;
};

// One part that is all of every row is one long row.
RowCopy joined(RowCopy copy) {
  if (copy.parts.size() == 1 && copy.parts[0].bytes == copy.row_bytes && copy.parts[0].stride == copy.row_bytes) {
    copy.row_bytes *= copy.rows;
    copy.parts[0].bytes = copy.parts[0].stride = copy.row_bytes;
    copy.rows = 1;
  }
  return copy;
}

void write_zeros(std::uint64_t begin, std::uint64_t end, const ByteSink& sink) {
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t count = std::min<std::uint64_t>(end - at, zeros.size());
    sink(at, {zeros.data(), count});
    at += count;
  }
}

void write_directly(const RowCopy& copy, const ByteSink& sink) {
  for (std::uint64_t row = 0; row < copy.rows; ++row) {
    const std::uint64_t begin = row * copy.row_bytes;
    std::uint64_t done = 0;
    for (const RowPart& part : copy.parts) {
      write_zeros(begin + done, begin + part.at, sink);
      if (part.bytes > 0) sink(begin + part.at, {part.source + row * part.stride, part.bytes});
      done = part.at + part.bytes;
    }
    write_zeros(begin + done, begin + copy.row_bytes, sink);
  }
}

void write_buffered(const RowCopy& copy, std::span<std::byte> buffer, const ByteSink& sink) {
  const std::uint64_t at_once = buffer.size() / copy.row_bytes;
  std::uint64_t covered = 0;
  for (const RowPart& part : copy.parts) covered += part.bytes;
  // The gaps are the same in every row and in every round: cleared once.
  if (covered < copy.row_bytes) std::memset(buffer.data(), 0, buffer.size());
  for (std::uint64_t row = 0; row < copy.rows; row += at_once) {
    const std::uint64_t count = std::min(at_once, copy.rows - row);
    for (const RowPart& part : copy.parts) {
      std::byte* target = buffer.data() + part.at;
      const std::byte* source = part.source + row * part.stride;
      for (std::uint64_t i = 0; i < count; ++i) {
        std::memcpy(target + i * copy.row_bytes, source + i * part.stride, part.bytes);
      }
    }
    sink(row * copy.row_bytes, buffer.first(count * copy.row_bytes));
  }
}

}  // namespace

RowCopy merge_rows(const MergedTensor& merged, std::span<const std::byte* const> sources,
                   std::span<const Shape* const> shapes) {
  const Rows whole(merged.whole, merged.dim);
  RowCopy copy{whole.count(), whole.bytes(), {}};
  copy.parts.reserve(merged.pieces.size());
  for (const Piece& piece : merged.pieces) {
    const auto rank = static_cast<std::size_t>(piece.rank);
    const Rows source({merged.whole.dtype, *shapes[rank]}, merged.dim);
    const std::uint64_t begin = source.offset(piece.begin);
    const std::uint64_t at = whole.offset(piece.at);
    copy.parts.push_back({sources[rank] + begin, source.bytes(), whole.offset(piece.at + piece.count) - at, at});
  }
  return joined(std::move(copy));
}

RowCopy split_rows(const SplitTensor& split, const TensorSpec& whole, const std::byte* source, int rank) {
  const Rows shard(split.shard, split.dim);
  const Rows from(whole, split.dim);
  RowCopy copy{shard.count(), shard.bytes(), {}};
  const Piece& piece = split.pieces[static_cast<std::size_t>(rank)];
  if (piece.count > 0) {
    const std::uint64_t begin = from.offset(piece.at);
    copy.parts.push_back(
        {source + begin, from.bytes(), from.offset(piece.at + piece.count) - begin, shard.offset(piece.begin)});
  }
  return joined(std::move(copy));
}

void copy_rows(const RowCopy& copy, std::span<std::byte> buffer, const ByteSink& sink) {
  if (copy.rows == 0 || copy.row_bytes == 0) return;
  std::uint64_t shortest = copy.row_bytes;
  for (const RowPart& part : copy.parts) shortest = std::min(shortest, part.bytes);
  if (copy.rows == 1 || shortest >= long_run || copy.row_bytes > buffer.size()) {
    write_directly(copy, sink);
  } else {
    write_buffered(copy, buffer, sink);
  }
}

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// One chunk between memory and file: byte shuffle and zstd, or as it is if that gains nothing. An encoder or decoder
// is for one thread and keeps its memory from chunk to chunk.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/tensor.hpp"

// Of zstd, whose header only the .cpp needs.
struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

namespace muster::statefile {

struct FreeZstd {
  void operator()(ZSTD_CCtx_s* context) const noexcept;
  void operator()(ZSTD_DCtx_s* context) const noexcept;
};

/// The levels that zstd has.
bool is_zstd_level(int level) noexcept;

class ChunkEncoder {
 public:
  /// Throws Error(no_space).
  explicit ChunkEncoder(int level);

  struct Encoded {
    std::span<const std::byte> bytes;  ///< valid until the next call, or as long as `elements`
    bool is_raw = false;               ///< all filters left out
  };
  /// `elements` are those that the tensor has of a chunk of `chunk_bytes`; zeros follow them. Throws Error(no_space).
  Encoded encode(std::span<const std::byte> elements, std::size_t chunk_bytes, std::size_t item);

 private:
  std::unique_ptr<ZSTD_CCtx_s, FreeZstd> context_;
  std::vector<std::byte> whole_;
  std::vector<std::byte> shuffled_;
  std::vector<std::byte> encoded_;
};

class ChunkDecoder {
 public:
  /// Throws Error(no_space).
  ChunkDecoder();

  /// Fills `target` with the first elements of a chunk of `chunk_bytes`. False if `stored` is not one frame of just
  /// that size; never writes more. Throws std::bad_alloc.
  bool decode(std::span<const std::byte> stored, bool is_raw, std::size_t chunk_bytes, std::size_t item,
              std::span<std::byte> target);

 private:
  std::unique_ptr<ZSTD_DCtx_s, FreeZstd> context_;
  std::vector<std::byte> whole_;
};

// HDF5's byte shuffle (filter 2): the first bytes of all elements, then the second ones, and so on. Signs and exponents
// of neighbours stand together then, which is what makes weights compressible.

/// `source` and `target` are of one size, a multiple of `item`, and apart.
void shuffle(std::span<const std::byte> source, std::size_t item, std::byte* target) noexcept;
/// The way back, of the first `elements` elements only.
void unshuffle(std::span<const std::byte> source, std::size_t item, std::size_t elements, std::byte* target) noexcept;

// How a tensor is cut into chunks: along one dimension only, so that a chunk's elements are one contiguous range of the
// tensor's bytes. At the end of that dimension HDF5 wants a whole chunk; what is past the end is zeros.

/// No chunk is larger before it is compressed.
inline constexpr std::uint64_t largest_chunk = std::uint64_t{64} << 20;

/// The extents that HDF5 is told: those of the tensor, or one of all bytes if elements share bytes.
std::vector<std::uint64_t> dataset_shape(DType dtype, const Shape& shape);

class ChunkGrid {
 public:
  /// Chunks of about `chunk_bytes` (between an element and largest_chunk). The tensor has elements and at least one
  /// dimension.
  static ChunkGrid make(DType dtype, const Shape& shape, std::uint64_t chunk_bytes);
  /// The grid that a file tells of; none if there is no such one, or its chunks would be too large.
  static std::optional<ChunkGrid> of(DType dtype, const Shape& shape, std::size_t dim, std::uint64_t rows);

  /// The dimension (of dataset_shape) that is cut, and how many of its indices a chunk has.
  [[nodiscard]] std::size_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::uint64_t count() const noexcept { return outer_ * per_outer_; }
  /// Of every chunk before compression, padding and all.
  [[nodiscard]] std::uint64_t chunk_bytes() const noexcept { return rows_ * row_bytes_; }
  /// Where a chunk's elements are among the tensor's bytes, and how many bytes they are: at most chunk_bytes().
  [[nodiscard]] std::uint64_t begin(std::uint64_t chunk) const noexcept;
  [[nodiscard]] std::uint64_t bytes(std::uint64_t chunk) const noexcept;
  /// The chunk that has this byte.
  [[nodiscard]] std::uint64_t chunk_at(std::uint64_t offset) const noexcept;
  /// A chunk's extents as HDF5 is told them.
  [[nodiscard]] std::vector<std::uint64_t> chunk_shape() const;

 private:
  ChunkGrid(std::vector<std::uint64_t> shape, std::size_t dim, std::uint64_t rows, std::uint64_t item_bytes);
  std::vector<std::uint64_t> shape_;
  std::size_t dim_;
  std::uint64_t rows_;
  std::uint64_t row_bytes_ = 1;  // of one index of dim_
  std::uint64_t outer_ = 1;      // indices of all dimensions before dim_
  std::uint64_t per_outer_ = 1;  // chunks along dim_
};

}  // namespace muster::statefile

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Encodes and decodes one chunk: byte shuffle and zstd, or the raw bytes if compression gains nothing. An encoder or
// decoder serves one thread and reuses its memory for each chunk.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/tensor.hpp"

// From zstd, whose header only the .cpp needs.
struct ZSTD_CCtx_s;
struct ZSTD_DCtx_s;

namespace muster::statefile {

struct FreeZstd {
  void operator()(ZSTD_CCtx_s* context) const noexcept;
  void operator()(ZSTD_DCtx_s* context) const noexcept;
};

/// Whether zstd supports this level.
bool is_zstd_level(int level) noexcept;

class ChunkEncoder {
 public:
  /// Throws Error(out_of_space).
  explicit ChunkEncoder(int level);

  struct Encoded {
    std::span<const std::byte> bytes;  ///< valid until the next call, or as long as `elements`
    bool is_raw = false;               ///< no filter is applied
  };
  /// Encodes a chunk of `chunk_bytes`. `elements` are the tensor's elements in the chunk, and zeros fill the rest.
  /// Throws Error(out_of_space).
  Encoded encode(std::span<const std::byte> elements, std::size_t chunk_bytes, std::size_t item);

 private:
  std::unique_ptr<ZSTD_CCtx_s, FreeZstd> context_;
  std::vector<std::byte> whole_;
  std::vector<std::byte> shuffled_;
  std::vector<std::byte> encoded_;
};

class ChunkDecoder {
 public:
  /// Throws Error(out_of_space).
  ChunkDecoder();

  /// Fills `target` with the first elements of a chunk of `chunk_bytes`. Returns false if `stored` is not one frame of
  /// exactly that size; never writes more. Throws std::bad_alloc.
  bool decode(std::span<const std::byte> stored, bool is_raw, std::size_t chunk_bytes, std::size_t item,
              std::span<std::byte> target);

 private:
  std::unique_ptr<ZSTD_DCtx_s, FreeZstd> context_;
  std::vector<std::byte> whole_;
};

// HDF5's byte shuffle (filter 2) stores the first bytes of all elements, then the second bytes, and so on. It groups
// the signs and exponents of neighbours, which makes weights compressible.

/// `source` and `target` have the same size, a multiple of `item`, and do not overlap.
void shuffle(std::span<const std::byte> source, std::size_t item, std::byte* target) noexcept;
/// Inverts the shuffle, for the first `elements` elements only.
void unshuffle(std::span<const std::byte> source, std::size_t item, std::size_t elements, std::byte* target) noexcept;

// How a tensor is cut into chunks: along one dimension only, so that a chunk's elements are one contiguous range of the
// tensor's bytes. HDF5 requires a whole chunk at the end of that dimension, so zeros fill the rest of it.

/// The largest size of a chunk before compression.
inline constexpr std::uint64_t largest_chunk = std::uint64_t{64} << 20;

/// Returns the extents of the HDF5 dataset: those of the tensor, or the number of its bytes if elements share bytes.
std::vector<std::uint64_t> dataset_shape(DType dtype, const Shape& shape);

class ChunkGrid {
 public:
  /// Makes chunks of about `chunk_bytes` (between one element and largest_chunk). The tensor has elements and at least
  /// one dimension.
  static ChunkGrid make(DType dtype, const Shape& shape, std::uint64_t chunk_bytes);
  /// Returns the grid that a file specifies; nullopt if it is not valid or its chunks are too large.
  static std::optional<ChunkGrid> of(DType dtype, const Shape& shape, std::size_t dim, std::uint64_t rows);

  /// The dimension (of dataset_shape) that is cut, and the number of its indices per chunk.
  [[nodiscard]] std::size_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::uint64_t count() const noexcept { return outer_ * per_outer_; }
  /// The size of every chunk before compression, including padding.
  [[nodiscard]] std::uint64_t chunk_bytes() const noexcept { return rows_ * row_bytes_; }
  /// The offset of a chunk's elements in the tensor's bytes, and their number of bytes (at most chunk_bytes()).
  [[nodiscard]] std::uint64_t begin(std::uint64_t chunk) const noexcept;
  [[nodiscard]] std::uint64_t bytes(std::uint64_t chunk) const noexcept;
  /// Returns the chunk that contains this byte.
  [[nodiscard]] std::uint64_t chunk_at(std::uint64_t offset) const noexcept;
  /// Returns a chunk's extents for HDF5.
  [[nodiscard]] std::vector<std::uint64_t> chunk_shape() const;

 private:
  ChunkGrid(std::vector<std::uint64_t> shape, std::size_t dim, std::uint64_t rows, std::uint64_t item_bytes);
  std::vector<std::uint64_t> shape_;
  std::size_t dim_;
  std::uint64_t rows_;
  std::uint64_t row_bytes_ = 1;  // bytes per index of dim_
  std::uint64_t outer_ = 1;      // indices of all dimensions before dim_
  std::uint64_t per_outer_ = 1;  // chunks along dim_
};

}  // namespace muster::statefile

// SPDX-License-Identifier: Apache-2.0
#pragma once
// One chunk between memory and file: byte shuffle and zstd, or as it is where that gains nothing. An encoder or decoder
// is for one thread and keeps its memory from chunk to chunk.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace muster::statefile {

/// The levels that zstd has.
bool is_zstd_level(int level) noexcept;

class ChunkEncoder {
 public:
  /// Throws Error(no_space).
  explicit ChunkEncoder(int level);
  ChunkEncoder(ChunkEncoder&&) noexcept;
  ChunkEncoder& operator=(ChunkEncoder&&) noexcept;
  ~ChunkEncoder();

  struct Encoded {
    std::span<const std::byte> bytes;  ///< valid until the next call, or as long as `elements`
    bool is_raw = false;               ///< all filters left out
  };
  /// `elements` are those that the tensor has of a chunk of `chunk_bytes`; zeros follow them. Throws Error(no_space).
  Encoded encode(std::span<const std::byte> elements, std::size_t chunk_bytes, std::size_t item);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
  std::vector<std::byte> whole_;
  std::vector<std::byte> shuffled_;
  std::vector<std::byte> encoded_;
};

class ChunkDecoder {
 public:
  /// Throws Error(no_space).
  ChunkDecoder();
  ChunkDecoder(ChunkDecoder&&) noexcept;
  ChunkDecoder& operator=(ChunkDecoder&&) noexcept;
  ~ChunkDecoder();

  /// Fills `target` with the first elements of a chunk of `chunk_bytes`. False where `stored` is not one frame of just
  /// that size; never writes more. Throws std::bad_alloc.
  bool decode(std::span<const std::byte> stored, bool is_raw, std::size_t chunk_bytes, std::size_t item,
              std::span<std::byte> target);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
  std::vector<std::byte> whole_;
};

// HDF5's byte shuffle (filter 2): the first bytes of all elements, then the second ones, and so on. Signs and exponents
// of neighbours stand together then, which is what makes weights compressible.

/// `source` and `target` are of one size, a multiple of `item`, and apart.
void shuffle(std::span<const std::byte> source, std::size_t item, std::byte* target) noexcept;
/// The way back, of the first `elements` elements only.
void unshuffle(std::span<const std::byte> source, std::size_t item, std::size_t elements, std::byte* target) noexcept;

}  // namespace muster::statefile

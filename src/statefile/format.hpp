// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a state file that describe its contents (docs/reference/state-file.md has the offsets of their fields):
//
//  1. The commit mark: the first 4096 bytes, HDF5's user block, written last.
//  2. The catalogue: the names, offsets and checksums of all tensors, in one range that is fast to read.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/state_file.hpp"
#include "src/hdf5/metadata_plan.hpp"
#include "src/os/file.hpp"
#include "src/statefile/chunk_codec.hpp"

namespace muster::statefile {

inline constexpr std::size_t user_block_bytes = 4096;
/// HDF5's superblock, version 3, follows the user block. Opening a file reads both at once.
inline constexpr std::size_t superblock_bytes = 48;
inline constexpr std::size_t head_bytes = user_block_bytes + superblock_bytes;
inline constexpr std::uint32_t format_version = 1;

/// A range of the file's bytes.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  [[nodiscard]] std::uint64_t end() const noexcept { return offset + bytes; }
};

/// The first byte is not text, and the last ones show whether a text-mode transfer changed line ends. HDF5 searches for
/// its own signature at this offset and must not find it.
inline constexpr std::array<unsigned char, 8> user_block_magic = {0x93, 'M', 'U', 'S', 'T', '\r', '\n', 0x1a};

/// The user block, byte for byte.
struct UserBlock {
  std::array<unsigned char, 8> magic = user_block_magic;
  std::uint32_t version = format_version;
  std::uint32_t block_bytes = user_block_bytes;
  StateFileInfo info = {};
  std::uint64_t file_bytes = 0;
  std::uint64_t tensors = 0;
  Extent catalogue = {};
  std::uint64_t catalogue_checksum = 0;
  Extent config = {};
  std::uint64_t config_checksum = 0;
  std::uint64_t superblock_checksum = 0;
  std::uint64_t metadata_checksum = 0;  ///< of every byte after the block that does not belong to a tensor
  std::array<std::byte, 3960> zeros = {};
  std::uint64_t own_checksum = 0;  ///< of all fields before it; encode_user_block() computes it
};
static_assert(sizeof(UserBlock) == user_block_bytes && sizeof(StateFileInfo) == 32);
static_assert(offsetof(UserBlock, info) == 16 && offsetof(UserBlock, catalogue) == 64);

std::array<std::byte, user_block_bytes> encode_user_block(const UserBlock& block);

/// Whether `head` shows that a state file's writer wrote the file and committed it.
bool has_magic(std::span<const std::byte> head) noexcept;

/// Decodes the commit mark. `head` has the first head_bytes of a file of `file_bytes` bytes, or all of it if it is
/// shorter. All ranges in the result are inside the file. Throws Error(corrupt) with os_error() ENODATA if the file is
/// truncated or has no mark, as network file systems may show it for a while. Throws Error(corrupt | version) for other
/// defects.
UserBlock decode_user_block(std::span<const std::byte> head, std::uint64_t file_bytes, const std::string& path);

bool is_zero(std::span<const std::byte> bytes) noexcept;

// Numbers at fixed offsets of a file, little-endian, as elements in memory are.

static_assert(std::endian::native == std::endian::little, "tensors are stored as they are in memory: little-endian");

/// The caller has checked that the number at `at` is inside `bytes`.
template <class Number>
Number load(std::span<const std::byte> bytes, std::size_t at) noexcept {
  Number value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class Number>
void store(std::span<std::byte> bytes, std::size_t at, Number value) noexcept {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

/// Uncompressed elements start at a multiple of element_alignment. Tensors of at least least_page_aligned bytes start
/// at a multiple of page_alignment.
inline constexpr std::uint64_t element_alignment = 64;
inline constexpr std::uint64_t page_alignment = 4096;
inline constexpr std::uint64_t least_page_aligned = 65536;
inline constexpr std::size_t largest_rank = 32;
inline constexpr std::size_t longest_name = 4096;

using StoredChunk = hdf5::Chunk;

/// How a tensor is cut; rows is 0 if it is not.
struct Chunking {
  std::uint64_t rows = 0;
  std::uint64_t first_chunk = 0;
  std::uint8_t dim = 0;
};

struct Catalogue {
  std::vector<StateTensor> tensors;
  std::vector<Chunking> chunking;  ///< one per tensor
  std::vector<StoredChunk> chunks;
};

/// The filter mask of a chunk to which no filter of the tensor was applied.
std::uint32_t raw_filter_mask(DType dtype) noexcept;

/// Returns the size of encode_catalogue()'s result, from facts that are known before anything is written.
std::uint64_t catalogue_bytes(std::span<const StateTensor> tensors, std::uint64_t chunks) noexcept;
std::vector<std::byte> encode_catalogue(const Catalogue& catalogue);

/// Decodes a catalogue and checks everything except that names are unique (NameIndex). All of `bytes` is used, names
/// are UTF-8, and sizes match shapes. Ranges in the file are inside it and overlap neither each other, nor the
/// catalogue, nor the config. Allocates no more than the bytes justify. Throws Error(corrupt).
Catalogue decode_catalogue(std::span<const std::byte> bytes, const UserBlock& block, const std::string& path);

/// Returns the ranges of all tensors in the file, ascending. Local; allocates.
std::vector<Extent> stored_extents(const Catalogue& catalogue);

/// Fills `target` with the bytes of a tensor's elements from `offset` on, with up to `workers` threads. The range is
/// inside the tensor. Throws as StateFile::tensor.
void read_elements(const os::ReadableFile& file, const Catalogue& catalogue, std::size_t index, std::uint64_t offset,
                   std::span<std::byte> target, std::size_t workers);

/// Maps names to indices of a list. It needs one allocation, because listing ten thousand tensors must be fast.
class NameIndex {
 public:
  NameIndex() = default;
  /// Adds the names of all `tensors`. Stops at the first duplicate name and returns its index.
  std::optional<std::size_t> build(const std::vector<StateTensor>& tensors);
  /// `tensors` is the list that was passed to build().
  [[nodiscard]] std::optional<std::size_t> find(const std::vector<StateTensor>& tensors,
                                                std::string_view name) const noexcept;

 private:
  std::vector<std::uint32_t> slots_;  // index + 1; the size is a power of two, at most half in use
};

}  // namespace muster::statefile

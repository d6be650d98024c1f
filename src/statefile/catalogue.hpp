// SPDX-License-Identifier: Apache-2.0
#pragma once
// The catalogue of a state file: all tensors, where they lie and what their bytes add up to, in one piece that is quick
// to read. docs/state-file.md has the places of its fields.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <optional>
#include <string_view>
#include "muster/state_file.hpp"
#include "src/hdf5/metadata_plan.hpp"
#include "src/statefile/chunk_codec.hpp"
#include "src/statefile/user_block.hpp"

namespace muster::os {
class ReadableFile;
}

namespace muster::statefile {

/// Uncompressed elements begin at a multiple of this, and from least_page_aligned bytes on of that.
inline constexpr std::uint64_t element_alignment = 64;
inline constexpr std::uint64_t page_alignment = 4096;
inline constexpr std::uint64_t least_page_aligned = 65536;
inline constexpr std::size_t largest_rank = 32;
inline constexpr std::size_t longest_name = 4096;

using StoredChunk = hdf5::Chunk;

/// How a tensor is cut; rows 0: it is not.
struct Chunking {
  std::uint64_t rows = 0;
  std::uint64_t first_chunk = 0;
  std::uint8_t dim = 0;
};

struct Catalogue {
  std::vector<StateTensor> tensors;
  std::vector<Chunking> chunking;  ///< one a tensor
  std::vector<StoredChunk> chunks;
};

/// The filters of a tensor's chunks all left out.
std::uint32_t raw_filter_mask(DType dtype) noexcept;

/// What encode_catalogue() will give, from what is known before anything is written.
std::uint64_t catalogue_bytes(std::span<const StateTensor> tensors, std::uint64_t chunks) noexcept;
std::vector<std::byte> encode_catalogue(const Catalogue& catalogue);

/// Everything is checked but that names are unique (NameIndex): all of `bytes` is used, names are UTF-8, sizes are
/// those of the shapes, what lies in the file lies inside and apart from each other, the catalogue and the config.
/// Nothing is allocated that the bytes do not justify. Throws Error(corrupt).
Catalogue decode_catalogue(std::span<const std::byte> bytes, const UserBlock& block, const std::string& path);

/// Everything of tensors in the file, ascending. Local; allocates.
std::vector<Extent> stored_extents(const Catalogue& catalogue);

/// Fills `target` with the bytes of a tensor's elements from `offset` on, by up to `workers` threads; the range is
/// inside. Throws as StateFile::tensor.
void read_elements(const os::ReadableFile& file, const Catalogue& catalogue, std::size_t index, std::uint64_t offset,
                   std::span<std::byte> target, std::size_t workers);

/// Names to places in a list. One allocation for all, because listing ten thousand tensors shall take no time.
class NameIndex {
 public:
  NameIndex() = default;
  /// Takes in the names of all `tensors`, up to the first that was there before: its place comes back.
  std::optional<std::size_t> build(const std::vector<StateTensor>& tensors);
  /// `tensors`: the list that was built from.
  [[nodiscard]] std::optional<std::size_t> find(const std::vector<StateTensor>& tensors,
                                                std::string_view name) const noexcept;

 private:
  std::vector<std::uint32_t> slots_;  // place + 1; a power of two of them, at most half in use
};

}  // namespace muster::statefile

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chunks of HDF5 datasets, decoded without libhdf5. Every buffer is as large as what must come out, whatever the stored
// bytes say of themselves.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace muster::inspect {

struct ChunkFilter {
  std::uint64_t id = 0;         ///< HDF5's number
  std::uint64_t parameter = 0;  ///< the first of its parameters: the element's bytes, for the shuffle
};

/// Whether decode_chunk has all of them, and at most one is a compression.
bool can_decode(std::span<const ChunkFilter> filters) noexcept;

/// Undoes the filters, the last first, but those whose bits are in the mask. Throws Error(corrupt) where what comes out
/// is not exactly `decoded_bytes`, or not what its checksum says.
std::vector<std::byte> decode_chunk(std::vector<std::byte> stored, std::span<const ChunkFilter> filters,
                                    std::uint32_t filter_mask, std::size_t decoded_bytes);

/// HDF5's checksum filter: Fletcher's sums over big-endian words of 16 bits.
std::uint32_t fletcher32(std::span<const std::byte> bytes) noexcept;

}  // namespace muster::inspect

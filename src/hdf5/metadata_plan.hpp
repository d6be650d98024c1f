// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an HDF5 file shall say, and the one function of libmuster-hdf5 that puts it into HDF5's own structures. Places
// are decided by the caller; nothing is read, nothing is written but memory.
//
// 1. The caller decides where each tensor, each compressed chunk, the config and the catalogue lie in the file.
// 2. make_metadata() makes a file in memory whose datasets have just these addresses (metadata_driver.hpp).
// 3. Its superblock and the rest of its structures come back as bytes; the caller writes them beside the data.
//
// The two libraries are of one build (the file name has the version), so these are ordinary C++ types.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/dtype.hpp"

namespace muster::hdf5 {

/// A stored chunk, as it stands in the catalogue: in the order of HDF5's chunk numbers, row-major.
struct Chunk {
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;
  std::uint32_t filter_mask = 0;  ///< bit i: filter i was not applied; 0, or all: the elements as they are
  std::uint64_t checksum = 0;     ///< of the stored bytes; HDF5 is not told
};

struct Dataset {
  std::string link_name;
  DType dtype = DType::u8;
  std::string_view dtype_name;
  std::span<const std::int64_t> shape;
  std::uint64_t bytes = 0;   ///< of all elements
  std::uint64_t offset = 0;  ///< if it is not chunked and has elements
  /// Compressed: extents of a chunk, one a dimension of the dataset (one in all for packed dtypes); else empty.
  std::vector<std::uint64_t> chunk_shape = {};
  std::span<const Chunk> chunks = {};
};

/// A number that HDF5's tools show as an attribute of the root group.
struct Fact {
  const char* name = "";
  std::uint64_t value = 0;
};

struct MetadataPlan {
  std::uint64_t user_block_bytes = 0;
  std::uint64_t config_offset = 0;
  std::uint64_t config_bytes = 0;  ///< at least 1
  std::uint64_t catalogue_offset = 0;
  std::uint64_t catalogue_bytes = 0;  ///< at least 1
  std::uint64_t metadata_offset = 0;  ///< everything but the superblock lies from here on; all data lies before it
  int zstd_level = 1;
  std::vector<Fact> facts = {};
  std::span<const Dataset> datasets = {};
};

struct Metadata {
  std::vector<std::byte> superblock;  ///< at the end of the user block
  std::vector<std::byte> structures;  ///< at metadata_offset; the file ends with them
  std::string failure;                ///< what libhdf5 said if it could not
};

/// The size of a superblock of version 3.
inline constexpr std::size_t superblock_bytes = 48;

/// The name and type of the function that libmuster-hdf5 exports. False: `result.failure` tells why. The caller
/// makes one call at a time, because libhdf5 is not thread-safe everywhere.
inline constexpr const char* make_metadata_symbol = "muster_hdf5_make_metadata";
using MakeMetadata = bool (*)(const MetadataPlan& plan, Metadata& result) noexcept;

}  // namespace muster::hdf5

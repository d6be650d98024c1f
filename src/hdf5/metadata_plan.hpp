// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plan of an HDF5 file, and the only function of libmuster-hdf5, which makes HDF5's own structures from it. The
// function reads and writes memory only.
//
// 1. The caller assigns offsets in the file to each tensor, each compressed chunk, the config and the catalogue.
// 2. make_metadata() makes a file in memory whose datasets have exactly these addresses (metadata_driver.hpp).
// 3. It returns the superblock and the other structures as bytes; the caller writes them next to the data.
//
// The two libraries come from one build (the file name has the version), so these are ordinary C++ types.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/dtype.hpp"

namespace muster::hdf5 {

/// A stored chunk, as in the catalogue: in the order of HDF5's chunk numbers, row-major.
struct Chunk {
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;
  std::uint32_t filter_mask = 0;  ///< bit i: filter i was not applied; 0, or all: the elements are stored uncompressed
  std::uint64_t checksum = 0;     ///< of the stored bytes; not passed to HDF5
};

struct Dataset {
  std::string link_name;
  DType dtype = DType::u8;
  std::string_view dtype_name;
  std::span<const std::int64_t> shape;
  std::uint64_t bytes = 0;   ///< of all elements
  std::uint64_t offset = 0;  ///< used if it is not chunked and has elements
  /// Compressed tensors: the extents of a chunk, one per dimension of the dataset (a single one for packed dtypes).
  /// Otherwise empty.
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
  /// all structures except the superblock start at this offset or later; all data is before it
  std::uint64_t metadata_offset = 0;
  int zstd_level = 1;
  std::vector<Fact> facts = {};
  std::span<const Dataset> datasets = {};
};

struct Metadata {
  std::vector<std::byte> superblock;  ///< at the end of the user block
  std::vector<std::byte> structures;  ///< at metadata_offset; the file ends with them
  std::string failure;                ///< libhdf5's message after a failure
};

/// The size of a superblock of version 3.
inline constexpr std::size_t superblock_bytes = 48;

/// The name and type of the function that libmuster-hdf5 exports. On failure it returns false, and `result.failure` has
/// the reason. The caller makes one call at a time, because libhdf5 is not thread-safe in every build.
inline constexpr const char* make_metadata_symbol = "muster_hdf5_make_metadata";
using MakeMetadata = bool (*)(const MetadataPlan& plan, Metadata& result) noexcept;

}  // namespace muster::hdf5

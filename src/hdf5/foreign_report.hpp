// SPDX-License-Identifier: Apache-2.0
#pragma once
// What muster-hdf5-reader says to the process that started it. Both are of one build: the magic tells other builds.
//
// The report is the magic and then records: a tag byte and its fields. "n" is an unsigned LEB128 number of at most 64
// bits, "z" a signed one (2x, or -2x-1), "t" n bytes of text after n, "b" n bytes after n.
//
//   fence    flags (FenceFlag), 1 byte
//   tensor   t path, n dtype, n big endian (0, 1), n rank, rank times n extent, b fill value (in the file's byte
//            order; empty: zeros), n layout (StorageLayout), then
//            contiguous: n offset (0: never written), n bytes
//            compact: nothing, a compact record follows later
//            chunked: rank times n chunk extent, n filters: each n id, n parameter; n flags (ChunkFlag), n count,
//            and of each chunk: n index less the one before (the first: less -1, so that no step is 0), z offset less
//            the end of the one before, n bytes, n filter mask. The index counts chunks row-major.
//   listed   nothing: all tensors are told; what follows is text and may be lost
//   compact  n tensor (counted from 0), b elements
//   shape    n tensor, n rank, extents: what its attribute "shape" has (of packed elements, the logical shape)
//   text     t path, t attribute (empty: the dataset itself), t value
//   issue    t path, n IssueCode, n number, t words
//   fatal    n FatalCode, t words; then the end
//   end      nothing
//
// The reading side believes none of it.

#include <cstdint>
#include <string_view>

namespace muster::hdf5 {

inline constexpr std::string_view foreign_report_magic = "MUSTER-HDF5-1\n";

enum class ForeignRecord : std::uint8_t {
  fence = 1,
  tensor = 2,
  listed = 3,
  compact = 4,
  shape = 5,
  text = 6,
  issue = 7,
  fatal = 8,
  end = 9,
};

enum FenceFlag : std::uint8_t {
  fence_seccomp = 1,
  fence_address_space = 2,
  fence_no_new_descriptors = 4,
};

enum class StorageLayout : std::uint8_t { contiguous = 0, compact = 1, chunked = 2 };

enum ChunkFlag : std::uint8_t {
  chunk_partial_unfiltered = 1,  ///< chunks across the dataset's edge are stored as they are
};

/// The words that belong to them are made where the report is read.
enum class IssueCode : std::uint8_t {
  soft_link = 1,
  external_link,
  user_link,
  second_name,
  too_deep,
  too_many_objects,
  group_damaged,
  object_damaged,
  named_type,
  object_kind,
  virtual_dataset,
  external_storage,
  element_type,
  dataspace,
  filter,
  chunk_bytes,
  chunk_count,
  dataset_damaged,
  name_length,
  attributes_skipped,
  attribute_count,
  text_length,
  text_count,
  text_damaged,
  layout,
};

enum class FatalCode : std::uint8_t {
  not_opened = 1,  ///< libhdf5 refuses the file
  no_fence,        ///< it was insisted on
  no_memory,
  too_large,  ///< the report
  io,
};

// Limits of both sides.
inline constexpr std::uint64_t most_report_bytes = std::uint64_t{12} << 20;
inline constexpr std::uint64_t most_objects = 200'000;
inline constexpr std::uint64_t most_chunks = std::uint64_t{1} << 20;        ///< of a file, stored or not
inline constexpr std::uint64_t most_chunk_bytes = std::uint64_t{64} << 20;  ///< of one, before compression
inline constexpr int most_depth = 32;
inline constexpr std::uint64_t most_path_bytes = 4096;
inline constexpr std::uint64_t most_text_bytes = std::uint64_t{64} << 10;  ///< of one attribute or dataset of text
inline constexpr std::uint64_t most_texts_bytes = std::uint64_t{2} << 20;  ///< of all of them
inline constexpr int most_rank = 32;
inline constexpr int most_filters = 8;
inline constexpr std::uint64_t most_fill_bytes = 16;

// Filters by HDF5's numbers.
inline constexpr std::uint64_t filter_deflate = 1;
inline constexpr std::uint64_t filter_shuffle = 2;
inline constexpr std::uint64_t filter_fletcher32 = 3;
inline constexpr std::uint64_t filter_zstd = 32015;

}  // namespace muster::hdf5

// SPDX-License-Identifier: Apache-2.0
#pragma once
// The report of muster-hdf5-reader (src/hdf5/foreign_report.hpp), read by somebody who believes none of it: every
// number is held against the limits of both sides and against the file's length.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/tensor.hpp"
#include "src/hdf5/foreign_report.hpp"
#include "src/inspect/chunk_decoder.hpp"
#include "src/inspect/foreign_hdf5.hpp"

namespace muster::inspect {

/// Where one chunk lies. A file may have a million of them.
struct StoredChunk {
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;
  std::uint32_t index : 24 = 0;  ///< among all the tensor's chunks, row-major
  std::uint32_t filter_mask : 8 = 0;
};
static_assert(sizeof(StoredChunk) == 16);
static_assert(hdf5::most_chunks <= (1U << 24U) && hdf5::most_filters <= 8);

/// One tensor and where its elements are.
struct ForeignTensor {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  std::uint64_t bytes = 0;

  std::size_t item_bytes = 1;  ///< of an element as it is stored; two elements where these are packed
  Shape stored_shape;          ///< in such elements
  bool is_big_endian = false;
  std::vector<std::byte> fill;  ///< one stored element; empty: zeros
  hdf5::StorageLayout layout = hdf5::StorageLayout::contiguous;
  std::uint64_t offset = 0;        ///< contiguous; 0: never written
  std::vector<std::byte> compact;  ///< compact
  Shape chunk_shape;               ///< chunked, and what follows
  std::uint64_t chunk_bytes = 0;
  std::vector<ChunkFilter> filters;
  bool partial_chunks_unfiltered = false;
  std::vector<StoredChunk> chunks;  ///< those that were written, by ascending index
};

struct ForeignFatal {
  hdf5::FatalCode code = hdf5::FatalCode::io;
  std::string words;
};

struct ForeignReport {
  std::uint8_t fence = 0;  ///< hdf5::FenceFlag
  std::vector<ForeignTensor> tensors;
  std::map<std::string, std::string> texts;
  std::vector<ForeignIssue> issues;
  std::optional<ForeignFatal> fatal;
  bool is_listed = false;  ///< all tensors are told
  bool is_whole = false;   ///< and all texts
};

struct ForeignReportLimits {
  std::uint64_t file_bytes = 0;
  std::uint64_t largest_expansion = 1024;
};

/// A report may end anywhere: is_listed and is_whole say how far it came. Tensors come sorted by name, none with bytes
/// outside the file or with those of another; such are issues. Throws Error(corrupt) on a report that no reader of this
/// build makes.
ForeignReport parse_foreign_report(std::span<const std::byte> bytes, const ForeignReportLimits& limits);

}  // namespace muster::inspect

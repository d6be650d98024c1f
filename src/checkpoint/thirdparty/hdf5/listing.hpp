// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lists a file, by rules that avoid libhdf5's weak points. Runs inside the sandbox.
//
// 1. Only hard links are followed, each object once (by its address), at most 32 groups deep.
// 2. A dataset's layout is queried before its extents: querying the extents of a virtual dataset opens its sources.
// 3. Types, extents, filters and chunks that are unknown or exceed a limit become an issue, and are not processed
//    further.
// 4. No element is read here (elements.cpp reads them on request).
// 5. Text is read last, after all tensors have been reported, because it exposes most code of libhdf5.

#include <hdf5.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/dtype.hpp"
#include "src/checkpoint/thirdparty/hdf5/reader.hpp"

namespace muster::hdf5 {

/// An object that the second pass must read.
struct ObjectToRead {
  haddr_t address = HADDR_UNDEF;
  std::string path;
  std::int64_t tensor = -1;  ///< its index in the report
  bool is_text = false;
  bool has_attributes = false;
};

/// The first pass: reports all objects of a file of `file_bytes` bytes. Returns those that the second pass must read.
/// Throws ReportFull, std::bad_alloc.
std::vector<ObjectToRead> report_objects(hid_t file, std::uint64_t file_bytes, ReportWriter& report);

/// The second pass (text.cpp): reports attributes and datasets of text. Throws ReportFull, std::bad_alloc.
void report_texts(hid_t file, const std::vector<ObjectToRead>& objects, ReportWriter& report);

// Elements of a third-party file, read by libhdf5 inside the sandbox. Chunks compressed with zstd or deflate are
// decoded by this program's own decoders, which check the length of a chunk. No plugin is ever loaded.

inline constexpr std::uint64_t most_chunk_bytes = std::uint64_t{64} << 20;  ///< of one chunk, before compression
inline constexpr std::uint64_t most_chunk_expansion = 8;

/// Chunks are decoded in memory: chunks of more than 16 MiB are accepted only if the file is that large itself.
constexpr std::uint64_t largest_chunk(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t always = std::uint64_t{16} << 20;
  return std::clamp(std::min(file_bytes, most_chunk_bytes) * most_chunk_expansion, always, most_chunk_bytes);
}

/// The memory for answers in addition to that of a listing: the elements, the cached chunks, and a chunk between its
/// filters.
constexpr std::uint64_t answer_memory(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t elements_and_kept = std::uint64_t{24} << 20;
  return elements_and_kept + 4 * largest_chunk(file_bytes);
}

/// Registers the decoders of zstd and deflate. Must be called before the file is opened.
void register_decoders();

/// Lets a file cache the chunks that were decoded last, for a client that reads piece by piece.
void keep_chunks(hid_t access);

/// Answers requests from the socket until it is closed. If the file could not be opened, every answer is `refusal`.
void answer_questions(hid_t file, const std::string& refusal, int socket);

// Maps HDF5 datatypes to dtypes.

struct ElementType {
  std::optional<DType> dtype = {};
  bool is_big_endian = false;
  std::size_t bytes = 0;     ///< of one element in the file
  bool is_text = false;      ///< a string: not a tensor, but possibly metadata
  std::string refusal = {};  ///< set if the type is neither a tensor's nor text
};

/// Maps the type alone. Accepts integers of 8 to 64 bits; IEEE and bfloat16 floats, and 8-bit ones of 4 or 5 exponent
/// bits; h5py's booleans {FALSE, TRUE}; compounds {r, i} of two F32. libhdf5 converts nothing, so e4m3 has the meaning
/// of HDF5 2.0 and of machine learning.
ElementType element_type(hid_t type);

}  // namespace muster::hdf5

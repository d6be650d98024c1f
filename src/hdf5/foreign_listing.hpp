// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lists a file by rules that keep libhdf5 away from what it does badly. Runs inside the fence.
//
// 1. Hard links alone are followed, each object once (by its address), 32 groups deep.
// 2. A dataset's layout is asked for before its extents: asking a virtual one for its extents opens its sources.
// 3. Types, extents, filters, chunks: what is not known here, or larger than a limit, is an issue and goes no further.
// 4. No element is read here (foreign_elements.cpp does that when it is asked).
// 5. Text comes last: reading it is the most that libhdf5 is made to do, and all tensors are told by then.

#include <hdf5.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/dtype.hpp"
#include "src/hdf5/foreign_reader.hpp"

namespace muster::hdf5 {

/// An object that has more to say in the second pass.
struct ObjectToRead {
  haddr_t address = HADDR_UNDEF;
  std::string path;
  std::int64_t tensor = -1;  ///< its number in the report
  bool is_text = false;
  bool has_attributes = false;
};

/// The first pass: all objects of a file of `file_bytes` bytes; those that have more to say. Throws ReportFull,
/// std::bad_alloc.
std::vector<ObjectToRead> report_objects(hid_t file, std::uint64_t file_bytes, ReportWriter& report);

/// The second pass (foreign_text.cpp): attributes and datasets of text. Throws ReportFull, std::bad_alloc.
void report_texts(hid_t file, const std::vector<ObjectToRead>& objects, ReportWriter& report);

// Elements of a foreign file, read by libhdf5 inside the fence. What went through zstd or deflate is undone by decoders
// of this program's, which know how long a chunk must be; no plugin is ever loaded.

inline constexpr std::uint64_t most_chunk_bytes = std::uint64_t{64} << 20;  ///< of one, before compression
inline constexpr std::uint64_t most_chunk_expansion = 8;

/// Chunks are decoded in memory: beyond 16 MiB they are for files that are large themselves.
constexpr std::uint64_t largest_chunk(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t always = std::uint64_t{16} << 20;
  return std::clamp(std::min(file_bytes, most_chunk_bytes) * most_chunk_expansion, always, most_chunk_bytes);
}

/// What answers need beyond a listing's memory: the elements, the chunks that are kept, and a chunk between its
/// filters.
constexpr std::uint64_t answer_memory(std::uint64_t file_bytes) noexcept {
  constexpr std::uint64_t elements_and_kept = std::uint64_t{24} << 20;
  return elements_and_kept + 4 * largest_chunk(file_bytes);
}

/// Registers the decoders of zstd and deflate. Before the file is opened.
void register_decoders();

/// Lets a file keep chunks that were decoded last, for whoever reads on piece by piece.
void keep_chunks(hid_t access);

/// Answers questions from the socket until it is closed. Where the file could not be opened, `refusal` answers all.
void answer_questions(hid_t file, const std::string& refusal, int socket);

// What an HDF5 datatype is among ours.

struct ElementType {
  std::optional<DType> dtype = {};
  bool is_big_endian = false;
  std::size_t bytes = 0;     ///< of one element in the file
  bool is_text = false;      ///< a string: no tensor, but perhaps metadata
  std::string refusal = {};  ///< if it is neither
};

/// Looks at the type alone. Integers of 8 to 64 bits; IEEE and bfloat16 floats, and 8-bit ones of 4 or 5 exponent bits;
/// h5py's booleans {FALSE, TRUE}; compounds {r, i} of two F32. Nothing is converted by libhdf5, so e4m3 is what
/// HDF5 2.0 and machine learning mean by it.
ElementType element_type(hid_t type);

}  // namespace muster::hdf5

// SPDX-License-Identifier: Apache-2.0
#pragma once
// What muster-hdf5-reader and the process that started it say to each other. Both are of one build: the magic tells
// other builds.
//
// A listing is the magic and then records: a tag byte and its fields. "n" is an unsigned LEB128 number of at most 64
// bits, "t" n bytes of text after n.
//
//   fence    n flags (FenceFlag)
//   tensor   t path, n dtype, n rank, rank times n extent, n address of the object, n bytes that it takes in the file,
//            n offset at which its elements lie as they are, in one piece and little endian (0: they are asked for)
//   listed   nothing: all tensors are told; what follows is text and may be lost
//   shape    n tensor (counted from 0), n rank, extents: what its attribute "shape" has (of packed elements, the
//            logical shape)
//   text     t path, t attribute (empty: the dataset itself), t value
//   issue    t path, t words
//   fatal    n FatalCode, t words; then the end
//   end      nothing
//
// Elements are asked for by an ElementsQuestion. The answer is the length of a refusal (8 bytes) and the refusal; where
// the length is 0, the elements, little endian.
//
// The other side believes none of it.

#include <cstdint>
#include <string_view>

namespace muster::hdf5 {

inline constexpr std::string_view foreign_report_magic = "MUSTER-HDF5-2\n";

enum class ForeignRecord : std::uint8_t { fence = 1, tensor, listed, shape, text, issue, fatal, end };

/// Elements [first, first + count) of the dataset at an address, row-major.
struct ElementsQuestion {
  std::uint64_t address = 0;
  std::uint64_t item_bytes = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

enum FenceFlag : std::uint8_t {
  fence_seccomp = 1,
  fence_address_space = 2,
  fence_no_new_descriptors = 4,
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
inline constexpr int most_depth = 32;
inline constexpr std::uint64_t most_path_bytes = 4096;
inline constexpr std::uint64_t most_text_bytes = std::uint64_t{64} << 10;  ///< of one attribute or dataset of text
inline constexpr std::uint64_t most_texts_bytes = std::uint64_t{2} << 20;  ///< of all of them
inline constexpr int most_rank = 32;
inline constexpr std::uint64_t longest_words = 1000;                          ///< of an issue or a refusal
inline constexpr std::uint64_t most_question_bytes = std::uint64_t{8} << 20;  ///< of the elements of one answer

}  // namespace muster::hdf5

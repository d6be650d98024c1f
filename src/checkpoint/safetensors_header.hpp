// SPDX-License-Identifier: Apache-2.0
#pragma once
// The header of a safetensors file as bytes: read with every check that the format asks for, and written.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "muster/safetensors.hpp"

namespace muster {

/// The eight bytes of the header's length.
inline constexpr std::uint64_t safetensors_prefix = 8;
inline constexpr std::string_view safetensors_metadata_key = "__metadata__";
/// Keys in the metadata that say what a U8 tensor really is.
inline constexpr std::string_view safetensors_dtype_key = "muster.dtype.";

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< in the order of their bytes; offsets from the start of the file
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;
};

/// `head` is the beginning of a file of `file_size` bytes: all of the header at least, or the whole file. `path` is for
/// messages. Throws Error(corrupt) that names the file, the tensor where there is one, and the defect. Nothing is
/// allocated beyond a small multiple of the header's bytes.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path);

/// Puts tensors in the order of the format's reference writer, without holes.
/// Fills `tensors` with offsets and sizes and returns length and header, padded to eight bytes. Throws Error(argument).
std::string make_safetensors_header(std::vector<TensorEntry>& tensors, std::map<std::string, std::string> metadata,
                                    const std::string& path);

/// Applies the keys "muster.dtype.NAME" to the entries and takes them out of the metadata. Throws Error(corrupt).
void apply_own_dtypes(SafetensorsHeader& header, const std::string& path);

}  // namespace muster

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads and writes the header of a safetensors file as bytes. Reading makes every check that the format requires.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/os/file.hpp"

namespace muster {

/// The size of the header's length field.
inline constexpr std::uint64_t safetensors_prefix = 8;
inline constexpr std::string_view safetensors_metadata_key = "__metadata__";
/// Keys in the metadata with the real dtype of a U8 tensor.
inline constexpr std::string_view safetensors_dtype_key = "muster.dtype.";

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< sorted by offset; offsets are from the start of the file
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;
};

/// Parses a header. `head` has the beginning of a file of `file_size` bytes: at least the whole header, or the whole
/// file. `path` is for messages. Throws Error(corrupt) that names the file, the tensor if there is one, and the defect.
/// Allocates at most a small multiple of the header's size.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path);

/// Reads the header of a safetensors file that begins at the byte `begin` of `file`. Throws as
/// parse_safetensors_header, and Error(io).
SafetensorsHeader read_safetensors_header(const os::ReadableFile& file, std::uint64_t begin = 0);

/// Sorts tensors as the format's reference writer does, without holes. Fills `tensors` with offsets and sizes and
/// returns length and header, padded to eight bytes. Throws Error(invalid_argument).
std::string make_safetensors_header(std::vector<TensorEntry>& tensors, std::map<std::string, std::string> metadata,
                                    const std::string& path);

/// Returns length and header of a file whose tensors have their places already, padded with spaces to `size` bytes.
/// Throws Error(invalid_argument) if that is too little.
std::string make_safetensors_header(std::span<const TensorEntry> placed, std::map<std::string, std::string> metadata,
                                    const std::string& path, std::uint64_t size);

/// Applies the keys "muster.dtype.NAME" to the entries and removes them from the metadata. Throws Error(corrupt).
void apply_own_dtypes(SafetensorsHeader& header, const std::string& path);

}  // namespace muster

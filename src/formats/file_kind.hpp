// SPDX-License-Identifier: Apache-2.0
#pragma once
// Detects the kind of a file from its first bytes, never from its name.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "src/os/file.hpp"

namespace muster::formats {

enum class FileKind : std::uint8_t {
  unknown,
  safetensors,
  zip,           ///< a file that torch.save wrote, or another archive
  torch_legacy,  ///< a file that torch.save wrote before PyTorch 1.6
  hdf5,          ///< begins with the signature of HDF5
  pickle,        ///< a pickle that torch.save did not write
  gguf,
  tar,
  gzip,
  numpy,
  lfs_pointer,  ///< the text that Git LFS leaves in place of a file
  html,
  json,
};

/// The number of bytes at the beginning of a file that determine its kind.
inline constexpr std::size_t kind_bytes = 512;

/// Detects the kind from `head`, the first kind_bytes of a file, or all of a shorter file. The kinds exclude each
/// other: a safetensors file begins with the length of its header, which may equal any signature, so safetensors is
/// checked first and by more than these bytes.
FileKind kind_of_file(std::span<const std::byte> head) noexcept;
/// Detects the kind of the bytes of a file from `begin` on. Throws Error(io).
FileKind kind_of_file(const os::ReadableFile& file, std::uint64_t begin = 0);

/// Describes a kind and how to get a usable file: "a tar archive: unpack it". Empty for safetensors and unknown files.
std::string_view advice_about(FileKind kind) noexcept;

}  // namespace muster::formats

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
  zip,           ///< a file of torch.save, or another archive
  torch_legacy,  ///< a file of torch.save before version 1.6
  hdf5,          ///< with HDF5's signature at its beginning
  pickle,        ///< of another program than torch.save
  gguf,
  tar,
  gzip,
  numpy,
  lfs_pointer,  ///< the text that Git LFS leaves in place of a file
  html,
  json,
};

/// Kinds need no more of the beginning of a file than this.
inline constexpr std::size_t kind_bytes = 512;

/// Detects the kind from `head`, the first kind_bytes of a file, or all of a shorter file. No file of one kind is taken
/// for another: a safetensors file begins with the length of its header, which may begin like any signature, so its
/// other marks are looked at first.
FileKind kind_of_file(std::span<const std::byte> head) noexcept;
/// Detects the kind of the bytes of a file from `begin` on. Throws Error(io).
FileKind kind_of_file(const os::ReadableFile& file, std::uint64_t begin = 0);

/// Describes a kind and how to get a usable file: "a Git LFS pointer: ...". Empty for kinds that are usable.
std::string_view advice_about(FileKind kind) noexcept;

}  // namespace muster::formats

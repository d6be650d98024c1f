// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kind of a file, told by its first bytes and never by its name.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "src/os/file.hpp"

namespace muster::formats {

enum class FileKind : std::uint8_t {
  unknown,
  safetensors,
  zip,           ///< what torch.save writes, and other archives
  torch_legacy,  ///< what torch.save wrote before it wrote zip archives
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

/// Tells the kind by `head`, the first kind_bytes of a file, or all of a shorter file. No file of one kind is taken for
/// another: a safetensors file begins with the length of its header, which may begin like any signature, so its other
/// marks are looked at first.
FileKind kind_of_file(std::span<const std::byte> head) noexcept;
/// Tells the kind of what a file has from the byte `begin` on. Throws Error(io).
FileKind kind_of_file(const os::ReadableFile& file, std::uint64_t begin = 0);

/// Describes a kind and how to get a usable file: "a Git LFS pointer: ...". Empty for kinds that need no words.
std::string_view advice_about(FileKind kind) noexcept;

}  // namespace muster::formats

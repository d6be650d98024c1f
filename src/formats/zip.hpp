// SPDX-License-Identifier: Apache-2.0
#pragma once
// Zip archives with uncompressed entries. Only the central directory is trusted. Archives that two readers could
// interpret differently are refused: duplicate entries, overlapping entries, and entries whose own header has another
// name than the directory.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster::formats {

struct ZipEntry {
  std::string name;
  std::uint64_t header = 0;  ///< position of its own header in the archive
  std::uint64_t begin = 0;   ///< position of its bytes: valid after locate()
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;  ///< 0: not computed, or the entry is empty
  std::uint16_t method = 0;
  std::uint16_t flags = 0;
};

/// Fills `target` from a position in the archive on. The range is inside the archive.
using ReadAt = std::function<void(std::uint64_t, std::span<std::byte>)>;

class ZipArchive {
 public:
  /// Reads the directory of an archive of `bytes` bytes, which must end at its last byte. Throws Error(corrupt |
  /// unsupported), and exceptions of `read`. Uses a small multiple of the directory's size in memory.
  ZipArchive(ReadAt read, std::uint64_t bytes);
  /// Returns the entries in the order of their bytes.
  [[nodiscard]] const std::vector<ZipEntry>& entries() const noexcept { return entries_; }
  [[nodiscard]] const ZipEntry* find(std::string_view name) const noexcept;
  /// Reads the own header of every entry and sets `begin`. Throws Error(unsupported) if an entry is compressed or
  /// encrypted, and Error(corrupt) if it is not at the position in the directory.
  void locate();
  /// Returns the bytes of an entry, at most `most`. Must be called after locate(). Verifies the checksum if the entry
  /// has one. Throws Error(corrupt).
  [[nodiscard]] std::vector<std::byte> read(const ZipEntry& entry, std::uint64_t most) const;

 private:
  [[nodiscard]] std::vector<std::byte> read_directory(std::uint64_t& count);

  ReadAt read_;
  std::uint64_t bytes_;
  std::uint64_t directory_begin_ = 0;
  std::vector<ZipEntry> entries_;
};

/// Returns the CRC-32 of `bytes`, which follow the bytes whose CRC-32 is `before`.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace muster::formats

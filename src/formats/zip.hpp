// SPDX-License-Identifier: Apache-2.0
#pragma once
// Zip archives whose entries are stored as they are, read by their central directory alone. What two readers could
// take for different contents is refused: entries twice, in each other's bytes, or with other names in front of their
// bytes than in the directory.

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
  std::uint64_t header = 0;  ///< where its own header begins, in the archive
  std::uint64_t begin = 0;   ///< where its bytes begin: known after locate()
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;  ///< 0: not computed, or of no bytes
  std::uint16_t method = 0;
  std::uint16_t flags = 0;
};

/// Fills `target` from a place in the archive on, which is inside of it.
using ReadAt = std::function<void(std::uint64_t, std::span<std::byte>)>;

class ZipArchive {
 public:
  /// Reads the directory of an archive of `bytes`, up to the last byte of which it goes. Throws Error(corrupt |
  /// unsupported), and what `read` throws. Memory is a small multiple of the directory's.
  ZipArchive(ReadAt read, std::uint64_t bytes);
  /// In the order of their bytes.
  [[nodiscard]] const std::vector<ZipEntry>& entries() const noexcept { return entries_; }
  [[nodiscard]] const ZipEntry* find(std::string_view name) const noexcept;
  /// Looks at every entry's own header: after it `begin` is known. Throws Error(unsupported) if an entry is compressed
  /// or encrypted, Error(corrupt) if it is not where the directory says.
  void locate();
  /// All of an entry after locate(), at most `most` bytes, held against its checksum if it has one. Throws
  /// Error(corrupt).
  [[nodiscard]] std::vector<std::byte> read(const ZipEntry& entry, std::uint64_t most) const;

 private:
  [[nodiscard]] std::vector<std::byte> read_directory(std::uint64_t& count);

  ReadAt read_;
  std::uint64_t bytes_;
  std::uint64_t directory_begin_ = 0;
  std::vector<ZipEntry> entries_;
};

/// The checksum of zip archives, of `bytes` after those that `before` is of.
std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace muster::formats

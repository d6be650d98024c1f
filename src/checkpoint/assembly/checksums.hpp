// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checksums of tensors, to detect changes of the written bytes on disk or in a copy. They detect accidents, not
// attackers.
//
// Next to a checkpoint, muster.checksums.json: {"muster_checksums": 1, "algorithm": "xxh3-64", "tensors": {NAME: "16
// hexadecimal digits"}}. A tensor's checksum is XXH3-64 with seed 0 of its bytes as they are in the file, so it does
// not change if tensors are moved to other files. With the algorithm "crc64-xz" it is CRC-64/XZ.
//
// In a shard's own metadata, one per piece of 1 MiB, so that a reader can check a part of a tensor: "muster.checksums":
// {"version": 1, "algorithm": "xxh3-64", "piece": 1048576, "tensors": {NAME: "16 hexadecimal digits of each piece, one
// after the other"}}. The text has the same length before and after the sums are known, so the offsets of the tensors
// do not depend on them.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/fingerprint.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/assembly/assembly.hpp"

namespace muster {

enum class ChecksumAlgorithm : std::uint8_t {
  xxh3_64,   ///< core/checksum.hpp
  crc64_xz,  ///< core/crc64.hpp: also that of fingerprints
};
/// Returns "xxh3-64" or "crc64-xz".
std::string_view to_string(ChecksumAlgorithm algorithm) noexcept;

struct Checksums {
  std::map<std::string, std::uint64_t, std::less<>> tensors = {};  ///< by name
  ChecksumAlgorithm algorithm = ChecksumAlgorithm::xxh3_64;
  friend bool operator==(const Checksums&, const Checksums&) = default;
};

/// Computes the checksum of one tensor, which is read in pieces; `done` receives the size of each piece. Throws as
/// SafetensorsFile::read, and what `done` throws.
std::uint64_t checksum_of(const SafetensorsFile& file, std::size_t index, ChecksumAlgorithm algorithm,
                          const std::function<void(std::uint64_t)>& done);

/// Computes the XXH3-64 of all tensors of these files, by several threads. Throws as checksum_of.
Checksums checksums_of(std::span<const SafetensorsFile> files, const std::function<void(std::uint64_t)>& done);

/// Computes the XXH3-64 of the tensors of these files in `directory`, which are read for it, so that the checksums
/// describe the stored bytes. Calls `between` meanwhile. Throws as SafetensorsFile::open and checksum_of.
Checksums checksums_of(const std::string& directory, std::span<const OutputFile> files,
                       const std::function<void()>& between);

/// Returns the CRCs of a fingerprint.
Checksums checksums_of(const Fingerprint& fingerprint);

/// Returns the text of muster.checksums.json. Throws Error(invalid_argument) on a name that is not UTF-8.
std::string checksums_text(const Checksums& checksums);
/// Throws Error(corrupt) if the text is malformed, and Error(version | unsupported) on another version or algorithm.
Checksums parse_checksums(std::string_view text);

/// Reads the file in `directory`; returns nullopt if it does not exist. Throws Error(io), and as parse_checksums with
/// the file's path.
std::optional<Checksums> read_checksums(const std::string& directory);
/// Writes the file atomically and durably, and replaces an older one. Throws Error(io | out_of_space | not_found).
void write_checksums(const std::string& directory, const Checksums& checksums);

inline constexpr std::string_view piece_checksums_key = "muster.checksums";
inline constexpr std::uint64_t checked_piece_bytes = 1 << 20;

/// The checksum of each piece of a tensor, by tensor name.
using PieceChecksums = std::map<std::string, std::vector<std::uint64_t>, std::less<>>;

/// Returns one zero for each piece of these tensors.
PieceChecksums no_piece_checksums(std::span<const MergedTensor> tensors);
std::string piece_checksums_text(const PieceChecksums& sums);
/// Returns the checksums in a shard's metadata; empty if it has none, or has an unknown version or algorithm. Throws
/// Error(corrupt) if their number differs from the number of pieces of a tensor.
PieceChecksums piece_checksums_of(const SafetensorsFile& file);

/// Computes the checksums of the tensors in `path`, all of which are written. Puts them into the file's metadata and
/// header if a place is reserved for them. Uses several threads, each of which calls `between` now and then. Throws
/// Error(io).
void add_piece_checksums(FilePlan& file, const std::string& path, const std::function<void()>& between);

/// A tensor of a shard with checksums; each piece is verified once. Thread-safe.
class CheckedTensor {
 public:
  CheckedTensor(SafetensorsFile file, std::size_t index, std::vector<std::uint64_t> sums);
  /// Reads as SafetensorsFile::read. Verifies all pieces that overlap the range. Throws Error(corrupt) that names the
  /// file and the tensor.
  void read(std::uint64_t offset, std::span<std::byte> target) const;

 private:
  void check(std::size_t piece, std::span<const std::byte> bytes) const;

  SafetensorsFile file_;
  std::size_t index_;
  std::vector<std::uint64_t> sums_;
  mutable std::vector<std::atomic<bool>> seen_;
};

/// Returns null if the tensor has no checksums.
std::shared_ptr<const CheckedTensor> checked_tensor(const SafetensorsFile& file, std::size_t index,
                                                    const PieceChecksums& sums);

}  // namespace muster

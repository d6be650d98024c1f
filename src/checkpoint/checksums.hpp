// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checksums of tensors, so that what was written can be told from what the disk or a copy made of it. They find
// accidents, not attackers.
//
// Beside a checkpoint, muster.checksums.json: {"muster_checksums": 1, "algorithm": "xxh3-64", "tensors": {NAME: "16
// hexadecimal digits"}}; a tensor's checksum is XXH3-64 with seed 0 of its bytes as they are in the file, so it does
// not change when tensors move to other files.
//
// In a shard's own metadata, one a piece of 1 MiB, so that whoever uses a part of a tensor can hold that part against
// them: "muster.checksums": {"version": 1, "algorithm": "xxh3-64", "piece": 1048576, "tensors": {NAME: "16 hexadecimal
// digits of each piece, one after the other"}}. The text is as long before the sums are known as after, so that the
// place of the tensors in the file does not depend on them.

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

#include "muster/safetensors.hpp"
#include "src/checkpoint/assembly.hpp"

namespace muster {

inline constexpr std::string_view checksums_file_name = "muster.checksums.json";

/// By tensor name (core/checksum.hpp).
using Checksums = std::map<std::string, std::uint64_t, std::less<>>;

/// Of one tensor, read in pieces; `done` is told of the bytes of each. Throws as SafetensorsFile::read, and what `done`
/// throws.
std::uint64_t checksum_of(const SafetensorsFile& file, std::size_t index,
                          const std::function<void(std::uint64_t)>& done);

/// Of all tensors of these files, by several threads. Throws likewise.
Checksums checksums_of(std::span<const SafetensorsFile> files, const std::function<void(std::uint64_t)>& done);

/// The file's text. Throws Error(argument) on a name that is not UTF-8.
std::string checksums_text(const Checksums& checksums);
/// Throws Error(corrupt) on what is no such text, Error(version | unsupported) on another version or algorithm.
Checksums parse_checksums(std::string_view text);

/// The file in `directory`; none if there is none. Throws Error(io), and as parse_checksums with the file's path.
std::optional<Checksums> read_checksums(const std::string& directory);
/// Appears whole, replacing an older one, and is durable. Throws Error(io | no_space | not_found).
void write_checksums(const std::string& directory, const Checksums& checksums);

inline constexpr std::string_view piece_checksums_key = "muster.checksums";
inline constexpr std::uint64_t checked_piece_bytes = 1 << 20;

/// Of each piece of a tensor, by its name.
using PieceChecksums = std::map<std::string, std::vector<std::uint64_t>, std::less<>>;

/// As many as these tensors have, all zero.
PieceChecksums no_piece_checksums(std::span<const MergedTensor> tensors);
std::string piece_checksums_text(const PieceChecksums& sums);
/// What a shard says; empty if it says nothing, or says it in a version or with an algorithm that is not known. Throws
/// Error(corrupt) if a tensor has another number of them than pieces.
PieceChecksums piece_checksums_of(const SafetensorsFile& file);

/// Puts the checksums of the tensors in `path`, all of which are there, into a file's metadata and header, if they have
/// a place for them. Several threads, each of which calls `between` now and then. Throws Error(io).
void add_piece_checksums(FilePlan& file, const std::string& path, const std::function<void()>& between);

/// A tensor of a shard that says its checksums; each piece is looked at once. Thread-safe.
class CheckedTensor {
 public:
  CheckedTensor(SafetensorsFile file, std::size_t index, std::vector<std::uint64_t> sums);
  /// As SafetensorsFile::read. Looks at all pieces of which some bytes are read. Throws Error(corrupt) that names the
  /// file and the tensor.
  void read(std::uint64_t offset, std::span<std::byte> target) const;

 private:
  void check(std::size_t piece, std::span<const std::byte> bytes) const;

  SafetensorsFile file_;
  std::size_t index_;
  std::vector<std::uint64_t> sums_;
  mutable std::vector<std::atomic<bool>> seen_;
};

/// Null if there are none of it.
std::shared_ptr<const CheckedTensor> checked_tensor(const SafetensorsFile& file, std::size_t index,
                                                    const PieceChecksums& sums);

}  // namespace muster

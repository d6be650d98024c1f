// SPDX-License-Identifier: Apache-2.0
#pragma once
// The commit mark of a state file: its first 4096 bytes, HDF5's user block, written last of all. docs/state-file.md
// has the places of its fields.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <bit>
#include <cstring>
#include "muster/state_file.hpp"

namespace muster::statefile {

inline constexpr std::size_t user_block_bytes = 4096;
/// HDF5's superblock, version 3, follows it. An opener reads both at once.
inline constexpr std::size_t superblock_bytes = 48;
inline constexpr std::size_t head_bytes = user_block_bytes + superblock_bytes;
inline constexpr std::uint32_t format_version = 1;

/// A range of the file's bytes.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  [[nodiscard]] std::uint64_t end() const noexcept { return offset + bytes; }
};

/// The first byte is no text, the last ones show what a transfer as text does to line ends. HDF5 looks for its own
/// signature here and must not find it.
inline constexpr std::array<unsigned char, 8> user_block_magic = {0x93, 'M', 'U', 'S', 'T', '\r', '\n', 0x1a};

/// The block, byte for byte.
struct UserBlock {
  std::array<unsigned char, 8> magic = user_block_magic;
  std::uint32_t version = format_version;
  std::uint32_t block_bytes = user_block_bytes;
  StateFileInfo info = {};
  std::uint64_t file_bytes = 0;
  std::uint64_t tensors = 0;
  Extent catalogue = {};
  std::uint64_t catalogue_checksum = 0;
  Extent config = {};
  std::uint64_t config_checksum = 0;
  std::uint64_t superblock_checksum = 0;
  std::uint64_t metadata_checksum = 0;  ///< of every byte after the block that belongs to no tensor
  std::array<std::byte, 3960> zeros = {};
  std::uint64_t own_checksum = 0;  ///< of all before it: encode_user_block() knows it
};
static_assert(sizeof(UserBlock) == user_block_bytes && sizeof(StateFileInfo) == 32);
static_assert(offsetof(UserBlock, info) == 16 && offsetof(UserBlock, catalogue) == 64);

std::array<std::byte, user_block_bytes> encode_user_block(const UserBlock& block);

/// Whether a file that begins like this was begun by a state file's writer and has got its mark.
bool has_magic(std::span<const std::byte> head) noexcept;

/// `head`: the first head_bytes of a file of `file_bytes`, or all of it where it is shorter. Whatever comes back lies
/// inside the file. Throws Error(corrupt) with os_error() ENODATA where the file is shorter than it says or has no
/// mark, as network file systems may show it for a while; Error(corrupt | version) else.
UserBlock decode_user_block(std::span<const std::byte> head, std::uint64_t file_bytes, const std::string& path);

bool is_zero(std::span<const std::byte> bytes) noexcept;

// Numbers at fixed places of a file, little-endian, as elements in memory are.

static_assert(std::endian::native == std::endian::little, "tensors are stored as they are in memory: little-endian");

/// The caller has seen to it that `at` and what follows is inside.
template <class Number>
Number load(std::span<const std::byte> bytes, std::size_t at) noexcept {
  Number value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class Number>
void store(std::span<std::byte> bytes, std::size_t at, Number value) noexcept {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

}  // namespace muster::statefile

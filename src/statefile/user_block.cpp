// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/user_block.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "muster/error.hpp"
#include "src/core/checksum.hpp"
#include "src/core/quoted.hpp"

namespace muster::statefile {
namespace {

// The first byte is no text, the last ones show what a transfer as text does to line ends. HDF5 looks for its own
// signature here and must not find it.
constexpr std::array<unsigned char, 8> magic = {0x93, 'M', 'U', 'S', 'T', '\r', '\n', 0x1a};

constexpr std::size_t at_version = 8;
constexpr std::size_t at_block_bytes = 12;
constexpr std::size_t at_job = 16;
constexpr std::size_t at_generation = 32;
constexpr std::size_t at_rank = 40;
constexpr std::size_t at_world_size = 44;
constexpr std::size_t at_file_bytes = 48;
constexpr std::size_t at_tensors = 56;
constexpr std::size_t at_catalogue = 64;  // offset, bytes, checksum
constexpr std::size_t at_config = 88;     // offset, bytes, checksum
constexpr std::size_t at_superblock_checksum = 112;
constexpr std::size_t at_metadata_checksum = 120;
constexpr std::size_t at_zeros = 128;
constexpr std::size_t at_own_checksum = user_block_bytes - 8;

static_assert(std::tuple_size_v<SyncGroup::Nonce> == at_generation - at_job);

[[noreturn]] void refuse(const std::string& path, const std::string& words, int os_error = 0) {
  throw Error(ErrorKind::corrupt, fmt::format("opening the state file {}: {}", in_quotes(path), words),
              {.path = path, .os_error = os_error});
}

bool is_inside(const Extent& extent, std::uint64_t file_bytes) noexcept {
  return extent.offset >= head_bytes && extent.offset <= file_bytes && extent.bytes <= file_bytes - extent.offset;
}

}  // namespace

bool is_zero(std::span<const std::byte> bytes) noexcept {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

std::array<std::byte, user_block_bytes> encode_user_block(const UserBlock& block) {
  std::array<std::byte, user_block_bytes> bytes{};
  std::memcpy(bytes.data(), magic.data(), magic.size());
  store(bytes, at_version, block.version);
  store(bytes, at_block_bytes, static_cast<std::uint32_t>(user_block_bytes));
  std::ranges::copy(block.info.job, bytes.begin() + at_job);
  store(bytes, at_generation, block.info.generation);
  store(bytes, at_rank, static_cast<std::uint32_t>(block.info.rank));
  store(bytes, at_world_size, static_cast<std::uint32_t>(block.info.world_size));
  store(bytes, at_file_bytes, block.file_bytes);
  store(bytes, at_tensors, block.tensors);
  store(bytes, at_catalogue, block.catalogue.offset);
  store(bytes, at_catalogue + 8, block.catalogue.bytes);
  store(bytes, at_catalogue + 16, block.catalogue_checksum);
  store(bytes, at_config, block.config.offset);
  store(bytes, at_config + 8, block.config.bytes);
  store(bytes, at_config + 16, block.config_checksum);
  store(bytes, at_superblock_checksum, block.superblock_checksum);
  store(bytes, at_metadata_checksum, block.metadata_checksum);
  store(bytes, at_own_checksum, tensor_checksum(std::span(bytes).first(at_own_checksum)));
  return bytes;
}

bool has_magic(std::span<const std::byte> head) noexcept {
  return head.size() >= magic.size() && std::memcmp(head.data(), magic.data(), magic.size()) == 0;
}

UserBlock decode_user_block(std::span<const std::byte> head, std::uint64_t file_bytes, const std::string& path) {
  if (!head.empty() && is_zero(head.first(std::min(head.size(), user_block_bytes))))
    refuse(path, "its commit mark is empty: whoever wrote it has not finished, and may never", ENODATA);
  if (!has_magic(head)) {
    if (head.size() < magic.size())
      refuse(path, fmt::format("it has {} bytes, and no state file is that short", file_bytes), ENODATA);
    refuse(path, "it is no state file (it does not begin like one)");
  }
  if (head.size() < head_bytes) refuse(path, fmt::format("it ends after {} bytes", file_bytes), ENODATA);
  const std::span<const std::byte> block = head.first(user_block_bytes);
  if (load<std::uint64_t>(block, at_own_checksum) != tensor_checksum(block.first(at_own_checksum)))
    refuse(path, "its commit mark is damaged (checksum)");
  UserBlock result;
  result.version = load<std::uint32_t>(block, at_version);
  if (result.version != format_version)
    throw Error(ErrorKind::version,
                fmt::format("opening the state file {}: it has version {} of the format, and this Muster knows version "
                            "{}; read it with the Muster that wrote it or a newer one",
                            in_quotes(path), result.version, format_version),
                {.path = path});
  if (load<std::uint32_t>(block, at_block_bytes) != user_block_bytes)
    refuse(path, "its commit mark has another length than 4096");
  if (!is_zero(block.subspan(at_zeros, at_own_checksum - at_zeros)))
    refuse(path, "its commit mark has bits that this version does not know");
  std::ranges::copy(block.subspan(at_job, result.info.job.size()), result.info.job.begin());
  result.info.generation = load<std::uint64_t>(block, at_generation);
  const auto rank = load<std::uint32_t>(block, at_rank);
  const auto world_size = load<std::uint32_t>(block, at_world_size);
  if (rank >= world_size || world_size > static_cast<std::uint32_t>(std::numeric_limits<int>::max()))
    refuse(path, fmt::format("it says that it is of rank {} of {}", rank, world_size));
  result.info.rank = static_cast<int>(rank);
  result.info.world_size = static_cast<int>(world_size);
  result.file_bytes = load<std::uint64_t>(block, at_file_bytes);
  if (file_bytes < result.file_bytes)
    refuse(path, fmt::format("it has {} of its {} bytes", file_bytes, result.file_bytes), ENODATA);
  if (file_bytes > result.file_bytes)
    refuse(path, fmt::format("it has {} bytes where its commit mark says {}: another program has written to it, or "
                             "copied it into another layout (h5repack)",
                             file_bytes, result.file_bytes));
  result.tensors = load<std::uint64_t>(block, at_tensors);
  result.catalogue = {load<std::uint64_t>(block, at_catalogue), load<std::uint64_t>(block, at_catalogue + 8)};
  result.catalogue_checksum = load<std::uint64_t>(block, at_catalogue + 16);
  result.config = {load<std::uint64_t>(block, at_config), load<std::uint64_t>(block, at_config + 8)};
  result.config_checksum = load<std::uint64_t>(block, at_config + 16);
  result.superblock_checksum = load<std::uint64_t>(block, at_superblock_checksum);
  result.metadata_checksum = load<std::uint64_t>(block, at_metadata_checksum);
  if (!is_inside(result.catalogue, file_bytes) || !is_inside(result.config, file_bytes))
    refuse(path, "its catalogue or its config lies outside of it");
  if (result.superblock_checksum != tensor_checksum(head.subspan(user_block_bytes, superblock_bytes)))
    refuse(path,
           "its HDF5 superblock is not the one that was written: another program has written to it, or copied it "
           "(h5repack)");
  return result;
}

}  // namespace muster::statefile

// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/user_block.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>

#include "muster/error.hpp"
#include "src/core/checksum.hpp"
#include "src/core/quoted.hpp"

namespace muster::statefile {
namespace {

constexpr std::size_t summed_bytes = offsetof(UserBlock, own_checksum);

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
  store(bytes, 0, block);
  store(bytes, summed_bytes, tensor_checksum(std::span(bytes).first(summed_bytes)));
  return bytes;
}

bool has_magic(std::span<const std::byte> head) noexcept {
  const auto& magic = user_block_magic;
  return head.size() >= magic.size() && std::memcmp(head.data(), magic.data(), magic.size()) == 0;
}

UserBlock decode_user_block(std::span<const std::byte> head, std::uint64_t file_bytes, const std::string& path) {
  if (!head.empty() && is_zero(head.first(std::min(head.size(), user_block_bytes))))
    refuse(path, "its commit mark is empty: whoever wrote it has not finished, and may never", ENODATA);
  if (!has_magic(head)) {
    if (head.size() < user_block_magic.size())
      refuse(path, fmt::format("it has {} bytes, and no state file is that short", file_bytes), ENODATA);
    refuse(path, "it is no state file (it does not begin like one)");
  }
  if (head.size() < head_bytes) refuse(path, fmt::format("it ends after {} bytes", file_bytes), ENODATA);
  const auto block = load<UserBlock>(head, 0);
  if (block.own_checksum != tensor_checksum(head.first(summed_bytes)))
    refuse(path, "its commit mark is damaged (checksum)");
  if (block.version != format_version)
    throw Error(ErrorKind::version,
                fmt::format("opening the state file {}: it has version {} of the format, and this Muster knows version "
                            "{}; read it with the Muster that wrote it or a newer one",
                            in_quotes(path), block.version, format_version),
                {.path = path});
  if (block.block_bytes != user_block_bytes) refuse(path, "its commit mark has another length than 4096");
  if (!is_zero(block.zeros)) refuse(path, "its commit mark has bits that this version does not know");
  if (block.info.rank < 0 || block.info.rank >= block.info.world_size)
    refuse(path, fmt::format("it says that it is of rank {} of {}", block.info.rank, block.info.world_size));
  if (file_bytes < block.file_bytes)
    refuse(path, fmt::format("it has {} of its {} bytes", file_bytes, block.file_bytes), ENODATA);
  if (file_bytes > block.file_bytes)
    refuse(path, fmt::format("it has {} bytes where its commit mark says {}: another program has written to it, or "
                             "copied it into another layout (h5repack)",
                             file_bytes, block.file_bytes));
  if (!is_inside(block.catalogue, file_bytes) || !is_inside(block.config, file_bytes))
    refuse(path, "its catalogue or its config lies outside of it");
  if (block.superblock_checksum != tensor_checksum(head.subspan(user_block_bytes, superblock_bytes)))
    refuse(path,
           "its HDF5 superblock is not the one that was written: another program has written to it, or copied it "
           "(h5repack)");
  return block;
}

}  // namespace muster::statefile

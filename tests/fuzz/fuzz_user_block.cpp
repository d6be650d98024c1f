// SPDX-License-Identifier: Apache-2.0
// Any bytes as the beginning of a state file. They are refused with Error(corrupt) or Error(version), or yield a commit
// mark whose parts are inside the file, and which is written again as the same bytes.
//
// The first byte selects the input. Even: the beginning of the file. Odd: eight bytes with the length of the file, then
// the fields of the block and the superblock. The target adds zeros and correct checksums to these.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "muster/error.hpp"
#include "src/core/checksum.hpp"
#include "src/statefile/format.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using namespace muster::statefile;
using muster::test::may_fail;
using muster::test::require;

constexpr std::size_t fields_bytes = 136;  // the fields and some of the zeros
constexpr std::size_t at_superblock_checksum = 112;

bool is_inside(const Extent& extent, std::uint64_t file_bytes) {
  return extent.offset >= head_bytes && extent.offset <= file_bytes && extent.bytes <= file_bytes - extent.offset;
}

void decode(std::span<const std::byte> head, std::uint64_t file_bytes) {
  static const std::string name = "fuzz";
  may_fail({ErrorKind::corrupt, ErrorKind::version}, [&] {
    const UserBlock block = decode_user_block(head, file_bytes, name);
    require(block.file_bytes == file_bytes && block.version == format_version && has_magic(head));
    require(block.info.rank >= 0 && block.info.rank < block.info.world_size);
    require(is_inside(block.catalogue, file_bytes) && is_inside(block.config, file_bytes));
    require(std::ranges::equal(encode_user_block(block), head.first(user_block_bytes)));
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::span<const std::byte> input = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] % 2 == 0) {
    decode(input.first(std::min(input.size(), head_bytes)), input.size());
    return 0;
  }
  if (input.size() < 8) return 0;
  std::uint64_t file_bytes = 0;
  std::memcpy(&file_bytes, input.data(), 8);
  input = input.subspan(8);
  std::array<std::byte, head_bytes> head{};
  const auto fields = input.first(std::min(input.size(), fields_bytes));
  std::ranges::copy(fields, head.begin());
  input = input.subspan(fields.size());
  std::ranges::copy(input.first(std::min(input.size(), superblock_bytes)), head.begin() + user_block_bytes);
  const std::uint64_t superblock = tensor_checksum(std::span(head).last(superblock_bytes));
  std::memcpy(head.data() + at_superblock_checksum, &superblock, 8);
  const std::uint64_t own = tensor_checksum(std::span(head).first(user_block_bytes - 8));
  std::memcpy(head.data() + user_block_bytes - 8, &own, 8);
  decode(head, file_bytes);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/foreign/packed_items.hpp"

#include <algorithm>
#include <iterator>
#include <span>

namespace muster::foreign {
namespace {

constexpr std::uint64_t most_memory = 256 << 20;
constexpr std::uint64_t memory_of_decoder = 4 << 20;

}  // namespace

std::shared_ptr<PackedItems::Open> PackedItems::open(const os::ReadableFile& file, const BoxItem& item) {
  const std::lock_guard lock(mutex_);
  const auto there = std::ranges::find_if(
      open_, [&](const auto& open) { return open->file == item.file && open->begin == item.begin; });
  if (there != open_.end()) {
    open_.splice(open_.begin(), open_, there);
    return open_.front();
  }
  const auto read = [&file, begin = item.begin](std::uint64_t at, std::span<std::byte> target) {
    file.read_at(begin + at, target);
  };
  const std::uint64_t memory = std::min(item.unpacked, 2 * formats::ZstdStream::most_kept) + memory_of_decoder;
  open_.emplace_front(
      new Open{item.file, item.begin, memory, {}, formats::ZstdStream(read, item.bytes, item.unpacked)});
  const std::shared_ptr<Open> opened = open_.front();
  std::uint64_t all = 0;
  for (auto place = open_.begin(); place != open_.end();) {
    all += (*place)->memory;
    place = all > most_memory ? open_.erase(place) : std::next(place);
  }
  return opened;
}

formats::ReadAt PackedItems::reader(const os::ReadableFile& file, const BoxItem& item) {
  return [open = open(file, item)](std::uint64_t at, std::span<std::byte> target) {
    const std::lock_guard lock(open->mutex);
    open->stream.read(at, target);
  };
}

std::uint64_t PackedItems::size(const os::ReadableFile& file, const BoxItem& item) {
  const std::shared_ptr<Open> opened = open(file, item);
  const std::lock_guard lock(opened->mutex);
  return opened->stream.size();
}

}  // namespace muster::foreign

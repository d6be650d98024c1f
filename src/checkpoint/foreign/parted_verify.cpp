// SPDX-License-Identifier: Apache-2.0
// Reads everything that is stored. A checksum covers a whole storage, which several tensors may share and of which they
// may use only a part. So storages are read, and a tensor itself is read only if a part of it has no checksum.

#include <fmt/core.h>

#include <algorithm>
#include <mutex>
#include <tuple>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/foreign/parted_tensors.hpp"
#include "src/core/parallel.hpp"
#include "src/formats/zip.hpp"

namespace muster::foreign {
namespace {

constexpr std::uint64_t read_at_once = 8 << 20;

}  // namespace

/// A storage, or a tensor without one.
struct PartedTensors::Reading {
  std::uint32_t file = 0;
  StoredBytes stored;
  std::size_t tensor = 0;
};

std::vector<PartedTensors::Reading> PartedTensors::readings(std::uint64_t& checked, const Wrong& wrong) const {
  std::mutex mutex;
  std::vector<Reading> all;
  parallel_for(entries_.size(), copy_workers(), [&](std::size_t tensor, std::size_t) {
    std::vector<Reading> mine;
    bool has_all = true;
    try {
      for (const Box& box : boxes_of(tensor)) {
        const auto extents = numbers(box.numbers + parts_[tensor].dims, parts_[tensor].dims);
        if (std::ranges::find(extents, 0) != extents.end()) continue;
        const BoxPlace& place = place_of(tensor, box);
        has_all = has_all && place.stored.crc != 0;
        if (place.stored.crc != 0) mine.push_back({place.file, place.stored, tensor});
      }
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      return wrong(tensor, Defect::file, error.what());
    }
    if (!has_all) mine = {{0, {}, tensor}};
    const std::lock_guard lock(mutex);
    checked += has_all && !mine.empty() ? 1 : 0;
    all.insert(all.end(), mine.begin(), mine.end());
  });
  // If tensors share a storage, its result is attributed to the first of them.
  const auto key = [](const Reading& reading) {
    return std::tuple(reading.file, reading.stored.begin, reading.stored.crc == 0 ? reading.tensor + 1 : 0);
  };
  std::ranges::sort(all, {}, [&](const Reading& reading) { return std::pair(key(reading), reading.tensor); });
  const auto is_same = [&](const Reading& a, const Reading& b) { return key(a) == key(b); };
  all.erase(std::unique(all.begin(), all.end(), is_same), all.end());
  return all;
}

void PartedTensors::verify_readings(const std::vector<Reading>& readings, const ProgressCallback& progress,
                                    const Wrong& wrong) const {
  std::mutex mutex;
  const auto tell = [&](std::size_t tensor, Defect defect, const std::string& words) {
    const std::lock_guard lock(mutex);
    wrong(tensor, defect, words);
  };
  const auto bytes_of = [&](const Reading& reading) {
    return reading.stored.crc == 0 ? entries_[reading.tensor].bytes : reading.stored.bytes;
  };
  std::uint64_t total = 0;
  for (const Reading& reading : readings) total += bytes_of(reading);
  ProgressCounter counter(progress, total);
  std::vector<std::vector<std::byte>> memory(copy_workers());
  const auto read_one = [&](const Reading& reading, std::vector<std::byte>& piece) {
    std::uint32_t crc = 0;
    for (std::uint64_t at = 0, bytes = bytes_of(reading); at < bytes; at += piece.size()) {
      piece.resize(std::min(bytes - at, read_at_once));
      if (reading.stored.crc == 0) {
        read(reading.tensor, at, piece);
      } else {
        files_[reading.file].read_at(reading.stored.begin + at, piece);
        crc = formats::crc32(piece, crc);
      }
      counter.add(piece.size());
    }
    if (crc != reading.stored.crc)
      tell(reading.tensor, Defect::checksum,
           fmt::format("tensor {}: its bytes at {} of {} have the checksum {:08x}, not {:08x}: they have changed",
                       in_quotes(entries_[reading.tensor].name), reading.stored.begin,
                       in_quotes(files_[reading.file].path()), crc, reading.stored.crc));
  };
  parallel_for(readings.size(), memory.size(), [&](std::size_t index, std::size_t worker) {
    try {
      read_one(readings[index], memory[worker]);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::cancelled) throw;
      tell(readings[index].tensor, Defect::file, error.what());
    }
  });
}

std::uint64_t PartedTensors::verify(const ProgressCallback& progress, const Wrong& wrong) const {
  std::uint64_t checked = 0;
  verify_readings(readings(checked, wrong), progress, wrong);
  return checked;
}

void PartedTensors::verify_stored(int process, int processes, const Wrong& wrong) const {
  std::uint64_t checked = 0;
  std::vector<Reading> all = readings(checked, wrong);
  std::erase_if(all, [](const Reading& reading) { return reading.stored.crc == 0; });
  std::vector<Reading> mine;
  for (auto i = static_cast<std::size_t>(process); i < all.size(); i += static_cast<std::size_t>(processes))
    mine.push_back(all[i]);
  verify_readings(mine, {}, wrong);
}

}  // namespace muster::foreign

// SPDX-License-Identifier: Apache-2.0
#pragma once
// Items that are stored compressed, read as if they were not.

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "src/base/fork_mutex.hpp"
#include "src/checkpoint/foreign/parted_tensors.hpp"
#include "src/formats/zstd_stream.hpp"
#include "src/os/file.hpp"

namespace muster::foreign {

/// Thread-safe. Of the items that were read last some are kept open, with 256 MiB of memory at most in all.
class PackedItems {
 public:
  /// Reads the bytes of an item of this file, which lives as long. Throws Error(corrupt) if it is no zstd stream of at
  /// most item.unpacked bytes.
  formats::ReadAt reader(const os::ReadableFile& file, const BoxItem& item);
  /// How many bytes it has. Throws likewise.
  std::uint64_t size(const os::ReadableFile& file, const BoxItem& item);

 private:
  struct Open {
    std::uint32_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t memory = 0;  // that it takes at most
    ForkMutex mutex;
    formats::ZstdStream stream;
  };
  std::shared_ptr<Open> open(const os::ReadableFile& file, const BoxItem& item);

  ForkMutex mutex_;
  std::list<std::shared_ptr<Open>> open_;  // what was read last is in front
};

}  // namespace muster::foreign

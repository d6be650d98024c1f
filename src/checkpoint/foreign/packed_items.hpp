// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads compressed items as if they were not compressed.

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "src/base/fork_mutex.hpp"
#include "src/checkpoint/foreign/parted_tensors.hpp"
#include "src/formats/zstd_stream.hpp"
#include "src/os/file.hpp"

namespace muster::foreign {

/// Thread-safe. Keeps recently used items open, with at most 256 MiB of memory in total.
class PackedItems {
 public:
  /// Returns a reader for the bytes of an item of `file`, which must outlive it. Throws Error(corrupt) if the item is
  /// not a zstd stream of at most item.unpacked bytes.
  formats::ReadAt reader(const os::ReadableFile& file, const BoxItem& item);
  /// Returns the decompressed size. Throws as reader().
  std::uint64_t size(const os::ReadableFile& file, const BoxItem& item);

 private:
  struct Open {
    std::uint32_t file = 0;
    std::uint64_t begin = 0;
    std::uint64_t memory = 0;  // upper bound
    ForkMutex mutex;
    formats::ZstdStream stream;
  };
  std::shared_ptr<Open> open(const os::ReadableFile& file, const BoxItem& item);

  ForkMutex mutex_;
  std::list<std::shared_ptr<Open>> open_;  // most recently read first
};

}  // namespace muster::foreign

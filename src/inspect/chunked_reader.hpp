// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs of a chunked tensor's elements, in row-major order, out of chunks of any shape.

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "src/inspect/foreign_report.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {

/// Decoded chunks of one file that were used last, for whoever reads a tensor piece after piece. Thread-safe.
class ChunkCache {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  /// Holds at most so many bytes, and always the last chunk.
  explicit ChunkCache(std::uint64_t most_bytes) : most_bytes_(most_bytes) {}
  [[nodiscard]] Bytes find(std::size_t tensor, std::uint64_t chunk);
  void put(std::size_t tensor, std::uint64_t chunk, Bytes bytes);
  /// How often a chunk was not there.
  [[nodiscard]] std::uint64_t misses() const noexcept;

 private:
  struct Entry {
    std::uint64_t key;
    Bytes bytes;
  };
  mutable std::mutex mutex_;
  std::uint64_t most_bytes_;
  std::uint64_t bytes_ = 0;
  std::uint64_t misses_ = 0;
  std::list<Entry> entries_;  ///< the last used one first
  std::unordered_map<std::uint64_t, std::list<Entry>::iterator> index_;
};

/// Elements [first, first + target / item_bytes) of a chunked tensor, in the file's byte order, a chunk after the
/// other: each is decoded at most a few times a call, and not at all where the cache has it. `number` is the tensor's,
/// for the cache. Throws Error(corrupt) with the tensor's name where a chunk does not decode, Error(io).
void read_chunked(const os::ReadableFile& file, const ForeignTensor& tensor, std::size_t number, std::uint64_t first,
                  std::span<std::byte> target, ChunkCache& cache);

/// Fills with a tensor's fill value.
void fill_elements(const ForeignTensor& tensor, std::span<std::byte> target) noexcept;

}  // namespace muster::inspect

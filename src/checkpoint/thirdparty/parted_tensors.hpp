// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors whose elements are stored in files as boxes, each with its own strides: the common form of all third-party
// checkpoints.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include "muster/verify.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/formats/zip.hpp"
#include "src/formats/zstd_stream.hpp"
#include "src/os/file.hpp"

namespace muster::thirdparty {

/// A range of a file for which the file's writer recorded a checksum (CRC-32).
struct StoredBytes {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;  ///< 0: no checksum
};
/// The location of the elements of a box.
struct BoxPlace {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;  ///< offset of the first element in the file
  Strides strides = {};     ///< in elements, never negative
  StoredBytes stored = {};  ///< the range that contains them
};
/// A range of a file in which a box is located when it is first read.
struct BoxItem {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t unpacked = 0;  ///< if not 0: it is a zstd stream with at most this many bytes after decoding
};

/// Returns the extents of the box of a whole tensor of this shape; a scalar has one dimension, too.
inline Shape box_extents(const Shape& shape) {
  return shape.empty() ? Shape{1} : shape;
}

class PackedItems;

/// Filled by one thread; thread-safe after that.
class PartedTensors : public TensorSource {
 public:
  /// Locates the elements of a box with this dtype and these extents in an item of `bytes` bytes; offsets count from
  /// its beginning. Throws if they are missing.
  using Locate =
      std::function<BoxPlace(const formats::ReadAt& read, std::uint64_t bytes, DType dtype, const Shape& extents)>;
  explicit PartedTensors(Locate locate = {});

  /// Adds a file, or returns the number of one that was added before. Throws as os::ReadableFile::open.
  std::uint32_t add_file(const std::string& path);
  [[nodiscard]] const os::ReadableFile& file(std::uint32_t number) const { return files_[number]; }
  /// Adds a tensor, to which the following boxes belong. They are in `extents`, which has as many elements as the
  /// tensor; empty: its shape.
  void add_tensor(const std::string& name, DType dtype, Shape shape, Shape extents = {});
  /// Adds a box that begins at `begin` in the tensor's extents. Throws Error(corrupt) if it is outside them, or its
  /// location is outside the file.
  void add_box(std::span<const std::int64_t> begin, std::span<const std::int64_t> extents, const BoxPlace& place);
  void add_box(std::span<const std::int64_t> begin, std::span<const std::int64_t> extents, const BoxItem& item);
  /// Adds a tensor that is contiguous in a file, at entry.offset.
  void add_plain(const TensorEntry& entry, std::uint32_t file);
  /// Adds another name of an existing tensor. Throws Error(corrupt) if that does not exist.
  void add_alias(const std::string& name, const std::string& source);
  /// Adds data of the checkpoint that does not become a tensor.
  void add_omission(Omission omission) { omissions_.push_back(std::move(omission)); }
  /// Must be called after the last box. Every element of every tensor must be in exactly one box. Otherwise throws
  /// Error(corrupt) that names the tensor, and two overlapping boxes or the missing amount.
  void finish();

  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return omissions_; }
  /// Reads everything once, on several threads, and verifies all checksums. Calls `wrong`, one call at a time, for each
  /// defective tensor (Defect::checksum | file). Returns the number of tensors that were verified against checksums.
  /// Throws what `progress` throws.
  using Wrong = std::function<void(std::size_t tensor, Defect defect, const std::string& words)>;
  std::uint64_t verify(const ProgressCallback& progress, const Wrong& wrong) const;
  /// Verifies only data with a checksum. The work is divided among `processes`, and this call does the share of
  /// `process`.
  void verify_stored(int process, int processes, const Wrong& wrong) const;
  /// Returns the paths, in the order in which they were added.
  [[nodiscard]] std::vector<std::string> paths() const;

 private:
  struct Box {
    std::size_t numbers = 0;  // index in numbers_: begin, extents
    mutable BoxPlace place = {};
    BoxItem item = {};
    bool is_item = false;
  };
  struct Parts {
    std::size_t first_box = 0;
    std::size_t extents = 0;  // index in numbers_
    std::size_t dims = 0;
  };
  [[nodiscard]] std::span<const std::int64_t> numbers(std::size_t at, std::size_t count) const {
    return std::span(numbers_).subspan(at, count);
  }
  [[nodiscard]] std::span<const Box> boxes_of(std::size_t tensor) const;
  Box& add_box(std::span<const std::int64_t> begin, std::span<const std::int64_t> extents);
  void check_place(const BoxPlace& place, std::span<const std::int64_t> extents, std::size_t item) const;
  void check_cover(std::size_t tensor) const;
  struct Reading;
  std::vector<Reading> readings(std::uint64_t& checked, const Wrong& wrong) const;
  void verify_readings(const std::vector<Reading>& readings, const ProgressCallback& progress,
                       const Wrong& wrong) const;
  const BoxPlace& place_of(std::size_t tensor, const Box& box) const;
  /// Returns the reader for a box's location: of a file, or of a packed item.
  [[nodiscard]] formats::ReadAt reader_of(const Box& box) const;
  void read_whole(std::size_t tensor, std::int64_t first, std::int64_t count, std::byte* target) const;

  Locate locate_;
  std::shared_ptr<PackedItems> packed_;
  std::vector<os::ReadableFile> files_;
  std::vector<TensorEntry> entries_;
  Omissions omissions_;
  std::vector<Parts> parts_;
  std::vector<Box> boxes_;
  std::vector<std::int64_t> numbers_;
  std::unique_ptr<std::once_flag[]> located_;  // by box
};

// Reads compressed items as if they were not compressed.

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

}  // namespace muster::thirdparty

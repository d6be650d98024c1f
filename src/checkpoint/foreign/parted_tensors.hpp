// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors whose elements lie in files in boxes, each with strides of its own: what all foreign checkpoints come to.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/verify.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/formats/zip.hpp"
#include "src/os/file.hpp"

namespace muster::foreign {

/// Bytes of a file that whoever wrote them has a checksum of (CRC-32).
struct StoredBytes {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;  ///< 0: none
};
/// Where the elements of a box are.
struct BoxPlace {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;  ///< of the first element, in the file
  Strides strides = {};     ///< in elements, none negative
  StoredBytes stored = {};  ///< that they are among
};
/// What a box is found by when it is first read: a stretch of a file.
struct BoxItem {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t unpacked = 0;  ///< not 0: it is a zstd stream, of at most so many bytes when it is decoded
};

/// Of elements without gaps, the last dimension innermost.
Strides row_major_strides(std::span<const std::int64_t> extents);

/// What the box of a whole tensor of this shape extends over: a scalar's has one dimension, too.
inline Shape box_extents(const Shape& shape) {
  return shape.empty() ? Shape{1} : shape;
}

class PackedItems;

/// Filled by one thread, then thread-safe.
class PartedTensors : public TensorSource {
 public:
  /// Finds the elements of a box of this dtype and these extents in an item of `bytes`; places count from its
  /// beginning. Throws if they are not there.
  using Locate =
      std::function<BoxPlace(const formats::ReadAt& read, std::uint64_t bytes, DType dtype, const Shape& extents)>;
  explicit PartedTensors(Locate locate = {});

  /// A file is there once, however often it is asked for. Throws as os::ReadableFile::open.
  std::uint32_t add_file(const std::string& path);
  [[nodiscard]] const os::ReadableFile& file(std::uint32_t number) const { return files_[number]; }
  /// Boxes that follow are this tensor's. They are in `extents`, which has as many elements as the tensor; empty: its
  /// shape.
  void add_tensor(const std::string& name, DType dtype, Shape shape, Shape extents = {});
  /// A box that begins somewhere in the tensor's extents. Throws Error(corrupt) if it is outside of them, or its place
  /// outside of the file.
  void add_box(std::span<const std::int64_t> begin, std::span<const std::int64_t> extents, const BoxPlace& place);
  void add_box(std::span<const std::int64_t> begin, std::span<const std::int64_t> extents, const BoxItem& item);
  /// A tensor that lies in a file as it is, at entry.offset.
  void add_plain(const TensorEntry& entry, std::uint32_t file);
  /// Another name of a tensor that is there. Throws Error(corrupt) if it is not.
  void add_alias(const std::string& name, const std::string& source);
  /// Data of the checkpoint that becomes no tensor here.
  void add_omission(Omission omission) { omissions_.push_back(std::move(omission)); }
  /// After the last box: every element of every tensor has to be in exactly one. Throws Error(corrupt) that names the
  /// tensor, and two boxes or how much is missing.
  void finish();

  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return omissions_; }
  /// Reads everything once, on several threads: what has a checksum is held against it. Tells `wrong`, one call at a
  /// time, of each tensor with which something is wrong (Defect::checksum | file), and returns how many were held
  /// against checksums. Throws what `progress` throws.
  using Wrong = std::function<void(std::size_t tensor, Defect defect, const std::string& words)>;
  std::uint64_t verify(const ProgressCallback& progress, const Wrong& wrong) const;
  /// Likewise what has a checksum alone, shared out to so many processes: the part of this one.
  void verify_stored(int process, int processes, const Wrong& wrong) const;
  /// Paths, in the order in which they were added.
  [[nodiscard]] std::vector<std::string> paths() const;

 private:
  struct Box {
    std::size_t numbers = 0;  // in numbers_: begin, extents
    mutable BoxPlace place = {};
    BoxItem item = {};
    bool is_item = false;
  };
  struct Parts {
    std::size_t first_box = 0;
    std::size_t extents = 0;  // in numbers_
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
  /// Reads what a box's place counts in: a file, or a packed item.
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

}  // namespace muster::foreign

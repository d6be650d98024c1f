// SPDX-License-Identifier: Apache-2.0

#include "src/checkpoint/thirdparty/parted_tensors.hpp"
#include <fmt/core.h>
#include <fmt/format.h>
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <mutex>
#include <span>
#include <tuple>
#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/strided_read.hpp"
#include "src/core/thread_pool.hpp"
#include "src/formats/zip.hpp"
#include "src/merge/boxes.hpp"

namespace muster::thirdparty {
namespace {

using Numbers = std::span<const std::int64_t>;

std::string box_text(Numbers begin, Numbers extents) {
  return merge::box_text({begin, extents});
}

}  // namespace

PartedTensors::PartedTensors(Locate locate) : locate_(std::move(locate)), packed_(std::make_shared<PackedItems>()) {}

std::uint32_t PartedTensors::add_file(const std::string& path) {
  for (std::size_t i = files_.size(); i-- > 0;)
    if (files_[i].path() == path) return static_cast<std::uint32_t>(i);
  files_.push_back(os::ReadableFile::open(path));
  return static_cast<std::uint32_t>(files_.size() - 1);
}

void PartedTensors::add_tensor(const std::string& name, DType dtype, Shape shape, Shape extents) {
  if (extents.empty()) extents = box_extents(shape);
  const std::uint64_t bytes = byte_size(dtype, shape);
  entries_.push_back({name, dtype, std::move(shape), 0, bytes});
  parts_.push_back({boxes_.size(), numbers_.size(), extents.size()});
  numbers_.insert(numbers_.end(), extents.begin(), extents.end());
}

PartedTensors::Box& PartedTensors::add_box(Numbers begin, Numbers extents) {
  const Numbers whole = numbers(parts_.back().extents, parts_.back().dims);
  if (!merge::is_inside({begin, extents}, whole))
    throw Error(
        ErrorKind::corrupt,
        fmt::format("tensor {}: its part {} + {} is out of range for {}", in_quotes(entries_.back().name),
                    to_string(Shape(begin.begin(), begin.end())), to_string(Shape(extents.begin(), extents.end())),
                    to_string(Shape(whole.begin(), whole.end()))));
  Box& box = boxes_.emplace_back();
  box.numbers = numbers_.size();
  numbers_.insert(numbers_.end(), begin.begin(), begin.end());
  numbers_.insert(numbers_.end(), extents.begin(), extents.end());
  return box;
}

void PartedTensors::add_box(Numbers begin, Numbers extents, const BoxPlace& place) {
  add_box(begin, extents).place = place;
  check_place(place, extents, itemsize(entries_.back().dtype));
  // If a tensor is contiguous in a file, its location is shown to users and tools.
  if (std::ranges::equal(place.strides, merge::row_major_strides(extents)) &&
      merge::volume(extents) * itemsize(entries_.back().dtype) == entries_.back().bytes)
    entries_.back().offset = place.begin;
}

void PartedTensors::add_box(Numbers begin, Numbers extents, const BoxItem& item) {
  Box& box = add_box(begin, extents);
  box.item = item;
  box.is_item = true;
}

void PartedTensors::add_plain(const TensorEntry& entry, std::uint32_t file) {
  add_tensor(entry.name, entry.dtype, entry.shape);
  const Shape extents = box_extents(entry.shape);
  add_box(Shape(extents.size(), 0), extents, BoxPlace{file, entry.offset, merge::row_major_strides(extents)});
}

void PartedTensors::add_alias(const std::string& name, const std::string& source) {
  const std::optional<std::size_t> place = find(source);
  if (!place)
    throw Error(ErrorKind::corrupt, fmt::format("tensor {} is another name of {}, which does not exist",
                                                in_quotes(name), in_quotes(source)));
  const std::span<const Box> there = boxes_of(*place);
  const std::vector<Box> boxes(there.begin(), there.end());
  const TensorEntry entry = entries_[*place];
  const Parts parts = parts_[*place];
  entries_.push_back({name, entry.dtype, entry.shape, entry.offset, entry.bytes});
  parts_.push_back({boxes_.size(), parts.extents, parts.dims});
  boxes_.insert(boxes_.end(), boxes.begin(), boxes.end());
}

void PartedTensors::check_place(const BoxPlace& place, Numbers extents, std::size_t item) const {
  bool fits = place.strides.size() == extents.size();
  std::vector<StridedAxis> axes;
  for (std::size_t i = 0; fits && i < extents.size(); ++i) {
    if (extents[i] == 0) return;
    StridedAxis& axis = axes.emplace_back(StridedAxis{static_cast<std::uint64_t>(extents[i])});
    fits = place.strides[i] >= 0 &&
           !__builtin_mul_overflow(static_cast<std::uint64_t>(place.strides[i]), item, &axis.from);
  }
  if (!fits || !is_within(place.begin, axes, item, files_[place.file].bytes()))
    throw Error(ErrorKind::corrupt, "truncated file: a tensor extends past its end",
                {.path = files_[place.file].path()});
}

std::span<const PartedTensors::Box> PartedTensors::boxes_of(std::size_t tensor) const {
  const std::size_t end = tensor + 1 < parts_.size() ? parts_[tensor + 1].first_box : boxes_.size();
  return std::span(boxes_).subspan(parts_[tensor].first_box, end - parts_[tensor].first_box);
}

void PartedTensors::check_cover(std::size_t tensor) const {
  const std::size_t dims = parts_[tensor].dims;
  std::vector<merge::BoxView> boxes;
  for (const Box& box : boxes_of(tensor))
    boxes.push_back({numbers(box.numbers, dims), numbers(box.numbers + dims, dims)});
  const auto refuse = [&](const std::string& words) {
    throw Error(ErrorKind::corrupt, fmt::format("tensor {}: {}", in_quotes(entries_[tensor].name), words));
  };
  const merge::Cover cover = merge::cover_of(boxes, 1);
  if (!cover.is_known) refuse("it has too many parts to check for overlaps");
  for (const auto& [one, other] : cover.overlaps)
    refuse(fmt::format("its parts {} and {} overlap", merge::box_text(boxes[one]), merge::box_text(boxes[other])));
  const std::uint64_t whole = merge::volume(numbers(parts_[tensor].extents, dims));
  if (cover.elements != whole) refuse(fmt::format("{} of {} elements are present", cover.elements, whole));
}

void PartedTensors::finish() {
  for (std::size_t i = 0; i < entries_.size(); ++i) check_cover(i);
  located_ = std::make_unique<std::once_flag[]>(boxes_.size());
}

const BoxPlace& PartedTensors::place_of(std::size_t tensor, const Box& box) const {
  if (!box.is_item) return box.place;
  std::call_once(located_[static_cast<std::size_t>(&box - boxes_.data())], [&] {
    const std::size_t dims = parts_[tensor].dims;
    const Numbers extents = numbers(box.numbers + dims, dims);
    try {
      const os::ReadableFile& in = files_[box.item.file];
      const BoxItem& item = box.item;
      if (item.begin > in.bytes() || item.bytes > in.bytes() - item.begin)
        throw Error(ErrorKind::corrupt, "truncated file: the part extends past its end");
      const bool is_packed = item.unpacked != 0;
      const formats::ReadAt read = [&](std::uint64_t at, std::span<std::byte> target) {
        in.read_at(item.begin + at, target);
      };
      BoxPlace place =
          locate_(is_packed ? packed_->reader(in, item) : read, is_packed ? packed_->size(in, item) : item.bytes,
                  entries_[tensor].dtype, Shape(extents.begin(), extents.end()));
      place.file = item.file;
      // For decoded data only zstd itself has a checksum.
      if (is_packed) place.stored = {};
      if (!is_packed) {
        place.begin += item.begin;
        place.stored.begin += item.begin;
        check_place(place, extents, itemsize(entries_[tensor].dtype));
      }
      box.place = std::move(place);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("tensor {}: part {} in {}", in_quotes(entries_[tensor].name),
                                           box_text(numbers(box.numbers, dims), extents),
                                           in_quotes(files_[box.item.file].path())));
    }
  });
  return box.place;
}

formats::ReadAt PartedTensors::reader_of(const Box& box) const {
  const os::ReadableFile& file = files_[box.is_item ? box.item.file : box.place.file];
  if (box.item.unpacked != 0) return packed_->reader(file, box.item);
  return [&file](std::uint64_t at, std::span<std::byte> target) { file.read_at(at, target); };
}

void PartedTensors::read_whole(std::size_t tensor, std::int64_t first, std::int64_t count, std::byte* target) const {
  const std::size_t dims = parts_[tensor].dims;
  const Numbers whole = numbers(parts_[tensor].extents, dims);
  const Strides to = merge::row_major_strides(whole);
  const std::size_t item = itemsize(entries_[tensor].dtype);
  merge::for_boxes(whole, first, count, [&](const Shape& begin, const Shape& size) {
    for (const Box& box : boxes_of(tensor)) {
      const Numbers there = numbers(box.numbers, dims);
      const Numbers extents = numbers(box.numbers + dims, dims);
      Shape from(dims);
      Shape common(dims);
      bool meet = true;
      for (std::size_t i = 0; meet && i < dims; ++i) {
        from[i] = std::max(begin[i], there[i]);
        common[i] = std::min(begin[i] + size[i], there[i] + extents[i]) - from[i];
        meet = common[i] > 0;
      }
      if (!meet) continue;
      const BoxPlace& place = place_of(tensor, box);
      std::uint64_t at = place.begin;
      std::int64_t element = -first;
      std::vector<StridedAxis> axes;
      for (std::size_t i = 0; i < dims; ++i) {
        at += static_cast<std::uint64_t>(place.strides[i] * (from[i] - there[i])) * item;
        element += from[i] * to[i];
        axes.push_back({static_cast<std::uint64_t>(common[i]), static_cast<std::uint64_t>(place.strides[i]) * item,
                        static_cast<std::uint64_t>(to[i]) * item});
      }
      read_strided(reader_of(box), at, std::move(axes), item, target + static_cast<std::uint64_t>(element) * item);
    }
  });
}

void PartedTensors::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  if (tensor >= entries_.size() || offset > entries_[tensor].bytes || target.size() > entries_[tensor].bytes - offset)
    throw Error(ErrorKind::invalid_argument, fmt::format("{} bytes at offset {} of tensor index {} are out of range",
                                                         target.size(), offset, tensor));
  if (target.empty()) return;
  const std::uint64_t item = itemsize(entries_[tensor].dtype);
  const std::uint64_t first = offset / item;
  const std::uint64_t end = (offset + target.size() + item - 1) / item;
  const auto count = static_cast<std::int64_t>(end - first);
  if (offset % item == 0 && target.size() % item == 0)
    return read_whole(tensor, static_cast<std::int64_t>(first), count, target.data());
  const auto memory = std::make_unique_for_overwrite<std::byte[]>((end - first) * item);
  read_whole(tensor, static_cast<std::int64_t>(first), count, memory.get());
  std::memcpy(target.data(), memory.get() + offset % item, target.size());
}

TensorDetail PartedTensors::detail(std::size_t tensor) const {
  TensorDetail detail{.stored_bytes = entries_[tensor].bytes};
  const std::span<const Box> boxes = boxes_of(tensor);
  const auto file_of = [](const Box& box) { return box.is_item ? box.item.file : box.place.file; };
  if (!boxes.empty() && std::ranges::all_of(boxes, [&](const Box& box) { return file_of(box) == file_of(boxes[0]); }))
    detail.file = files_[file_of(boxes[0])].path();
  return detail;
}

std::vector<std::string> PartedTensors::paths() const {
  std::vector<std::string> paths;
  for (const os::ReadableFile& file : files_) paths.push_back(file.path());
  return paths;
}

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
  std::shared_ptr<Open> opened = open_.front();
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

// Reads everything that is stored. A checksum covers a whole storage, which several tensors may share and of which they
// may use only a part. So storages are read, and a tensor itself is read only if a part of it has no checksum.
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
           fmt::format("tensor {}: checksum mismatch: data is corrupted: the bytes at offset {} of {} have the "
                       "checksum {:08x}, expected {:08x}",
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

}  // namespace muster::thirdparty
